"""Attention of a block, or a tree of tokens, over a head's cached context: what each draft layer sees while decoding.

Dimension key: B batch, T block positions, S context, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.context_cache import HeadCache
from jetflow.kernels import dispatch
from jetflow.kernels.ancestors import pack_bits
from jetflow.kernels.masked_attention import masked_attention
from jetflow.kernels.tree_attention import tree_attention

# Attention of one layer: its number, then queries, keys and values of the block [B, H, T, D].
LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def block_attention(config: DraftHeadConfig, cache: HeadCache, in_block_mask: Tensor, depths: Tensor) -> LayerAttention:
    """Returns the attention of all layers for one pass.

    Args:
        config: of the head; its windowed layers see the last positions alone.
        cache: the rows' context, with room for the block, which is written behind it.
        in_block_mask: bool [T, T] or [B, T, T], which slots see each other in layers without a window.
        depths: int64 [1, T] or [B, T], places of the slots behind the root.
    """
    window = config.window
    # A mask over all keys would depend on the lengths, which a recorded pass must not.
    make = _by_kernel if cache.is_static or dispatch.runs_kernels(in_block_mask) else _by_mask
    everywhere = make(cache, in_block_mask, depths, None)
    if window is None:
        return everywhere
    in_window = in_block_mask.tril() if window.causal and not config.causal else in_block_mask
    nearby = make(cache, in_window, depths, window.size)
    return lambda index, *args: (nearby if index in window.layers else everywhere)(index, *args)


def _by_kernel(cache: HeadCache, in_block_mask: Tensor, depths: Tensor, window: int | None) -> LayerAttention:
    """A block is a special tree behind a prefix."""
    rows, size = len(cache.lengths), in_block_mask.shape[-1]
    counts = torch.arange(rows + 1, dtype=torch.int32, device=in_block_mask.device)
    packed: dict[str, Any] = {
        "bits": pack_bits(in_block_mask).expand(rows, size, -1).flatten(0, 1),
        "row_starts": counts * size,
        "prefix_lens": cache.starts.int(),
        "depths": depths.int().expand(rows, size).flatten(),
        "max_nodes": size,
        "max_prefix": cache.longest,
        "window": window,
    }

    def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        nodes = queries.transpose(1, 2)
        out, _ = tree_attention(nodes.flatten(0, 1).contiguous(), *cache.write_block(index, keys, values), **packed)
        return out.view_as(nodes).transpose(1, 2)

    return attend


def _by_mask(cache: HeadCache, in_block_mask: Tensor, depths: Tensor, window: int | None) -> LayerAttention:
    mask = _dense_mask(cache, in_block_mask, depths, window)
    # No slot sees what lies before the window of the first one.
    first = 0 if window is None else max(0, min(cache.lengths) - window + 1)
    mask = mask[..., first:]

    def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = cache.write_block(index, keys, values)
        return masked_attention(queries, keys[:, :, first:], values[:, :, first:], mask)

    return attend


def _dense_mask(cache: HeadCache, in_block_mask: Tensor, depths: Tensor, window: int | None) -> Tensor:
    """Returns bool [B, 1, T, longest context + T]; row b's block begins at its own length."""
    rows, size, longest, device = len(cache.lengths), in_block_mask.shape[-1], max(cache.lengths), in_block_mask.device
    block = in_block_mask.expand(rows, size, size)
    if window is None and not cache.is_ragged:
        return torch.cat([block.new_ones(rows, size, longest), block], dim=-1)[:, None]
    # Places of the keys behind the root, so that those of the context are below 0.
    places = torch.arange(longest + size, device=device) - torch.tensor(cache.lengths, device=device)[:, None]
    inside = ((places >= 0) & (places < size))[:, None]
    block = block.gather(2, places.clamp(0, size - 1)[:, None].expand(-1, size, -1)) & inside
    context = (places < 0)[:, None]
    if window is not None:
        context = context & (places[:, None] > depths[..., None] - window)
    return (block | context)[:, None]
