"""Storage of masks: dense bool, additive, or FlexAttention's BlockMask. Chosen here and nowhere else.

Dimension key: B batch, H heads, Q queries, KV keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jetflow.protocols import MaskMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def dense(rule: MaskMod, batch: int, num_heads: int, q_len: int, kv_len: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Evaluates a rule everywhere.

    Args:
        rule: a mask_mod whose tensors are on `device`.
        batch: B.
        num_heads: H; 1 where all heads share the mask.
        q_len: queries Q.
        kv_len: keys KV.
        device: where the mask is made.

    Returns:
        bool [B, H, Q, KV], True means "may attend".
    """
    b, h, q, kv = (torch.arange(size, device=device) for size in (batch, num_heads, q_len, kv_len))
    mask = rule(b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], kv[None, None, None, :])
    return mask.expand(batch, num_heads, q_len, kv_len)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a bool mask into one that is added to attention logits: 0 where True, -inf where False.

    Raises:
        ValueError: `mask` is not bool, or on the CPU, a query may attend to nothing (its softmax would be NaN).
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    if mask.device.type == "cpu" and not bool(mask.any(dim=-1).all()):
        raise ValueError("mask has a query that may attend to nothing; every query must see at least itself")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def block_mask(
    rule: MaskMod, batch: int, num_heads: int, q_len: int, kv_len: int, *, device: torch.device | str = "cpu"
) -> BlockMask:
    """Builds FlexAttention's block-sparse form of a rule; arguments as for `dense`."""
    # Loaded here because it brings in torch.compile, which takes seconds.
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(rule, batch, num_heads, q_len, kv_len, device=str(device))
