"""Grouped attention in plain PyTorch, under a dense mask (heads and verifier) or a block mask (training on a GPU).

Dimension key: B batch, Hq query heads, Hk key-value heads, G = Hq / Hk, N nodes, S keys, D head dimension.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None) -> Tensor:
    """Attends with grouped heads without copying keys and values once per query head.

    The G query heads that share a key-value head are laid out as further queries, so that keys and values are read
    once per group.

    Args:
        query: float [B, Hq, N, D].
        key: float [B, Hk, S, D], any strides.
        value: float [B, Hk, S, D], any strides.
        mask: bool [B, 1, N, S], True means "may attend"; None lets every node see every key.
        scale: factor on the logits, 1 / sqrt(D) when absent.

    Returns:
        float [B, Hq, N, D] in the dtype of `query`.

    Raises:
        ValueError: Hq is no multiple of Hk, or `mask` is not bool.
    """
    batch, query_heads, nodes, head_dim = query.shape
    key_heads = key.shape[1]
    if query_heads % key_heads:
        raise ValueError(f"query heads ({query_heads}) must be a multiple of key heads ({key_heads})")
    # A float mask of 0 and 1 would be taken as a bias without any error.
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    group = query_heads // key_heads
    packed = query.reshape(batch, key_heads, group * nodes, head_dim)
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1) if group > 1 else mask
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, query_heads, nodes, head_dim)


def block_masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """The same under a FlexAttention block mask, compiled where there is a GPU."""
    return _flex_attention(query.device.type)(query, key, value, block_mask=mask, enable_gqa=True)


@cache
def _flex_attention(device_type: str) -> Any:
    """FlexAttention, compiled where there is a GPU: uncompiled it makes the whole matrix of scores."""
    # Loaded here because it brings in torch.compile, which takes seconds.
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention
