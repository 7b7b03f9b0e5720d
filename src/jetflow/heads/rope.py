"""Rotary position embedding of draft heads, always computed in float32.

Dimension key: B batch, T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RotaryEmbedding:
    """Cosines and sines for given positions.

    A plain object and no module: a module's `.to(bfloat16)` would round the frequencies, which dephases far positions.

    Args:
        rope_parameters: transformers' spelling; every `rope_type` that transformers knows.
        head_dim: head dimension D.
        max_position_embeddings: positions that the embedding is made for.

    Raises:
        ValueError: the rope type is unknown or rotates a part of the head only.
    """

    def __init__(self, rope_parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int):
        kind = rope_parameters.get("rope_type", "default")
        if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"rope_parameters={dict(rope_parameters)}: partial rotation is not supported")
        if kind == "default":
            # The device is named because modules may be built under `torch.device("meta")`.
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            self._frequencies, self._scale = 1.0 / rope_parameters["rope_theta"] ** exponents, 1.0
            return
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted(["default", *ROPE_INIT_FUNCTIONS]))
            raise ValueError(f"rope_type={kind!r} must be one of {known}")
        config = Qwen3Config(
            rope_parameters=dict(rope_parameters),
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
        )
        with torch.device("cpu"):
            self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [B, 1, T, D] in `dtype` for `positions` int64 [B, T]."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def rotate(states: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Applies the rotation to `states` [B, heads, T, D]."""
    cos, sin = cos_sin
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
