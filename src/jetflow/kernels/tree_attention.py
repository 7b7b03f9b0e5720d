"""Attention of tree nodes over their row's committed prefix and their own ancestors, for batches of trees of any sizes.

`tree_attention` runs in Triton, `tree_attention_reference` is its plain PyTorch twin, with the same signature; both
take tensors only. Keys and values lie where the cache keeps them: the prefix of a row, then its own nodes,
in contiguous memory or in pages.

Dimension key: B rows, T nodes of all trees, Hq query heads, Hk key-value heads, S slots, D head dimension, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.kernels.ancestors import unpack_bits

MAX_HEAD_DIM, MAX_NODES = 256, 1024
# Prefix keys per split of the Triton kernel: short enough to fill a GPU at one row, long enough that joining is cheap.
SPLIT = 2048


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    row_starts: Tensor,
    prefix_lens: Tensor,
    depths: Tensor,
    *,
    max_nodes: int,
    max_prefix: int,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends from the nodes of all trees.

    Node i of row b sees the slots `[0, prefix_lens[b])` and of the slots `prefix_lens[b] + j` those of nodes j whose bit is
    set. No mask of nodes by keys is made.

    Args:
        query: float16, bfloat16 or float32 [T, Hq, D], the nodes of row 0, then those of row 1, and so on.
        key: [B, Hk, S, D] of any strides, or with a block table [pages, page size, Hk, D].
        value: like `key`.
        bits: int64 [T, W], see `pack_ancestors`; W is at least ceil(max_nodes / 64).
        row_starts: int32 [B + 1], where each row's nodes begin in `query`; the last entry is T.
        prefix_lens: int32 [B], committed tokens of each row.
        depths: int32 [T], depth of each node, which a window is measured with.
        max_nodes: most nodes of a row; at most 1024.
        max_prefix: longest prefix, or more.
        block_table: int32 [B, P], the pages of each row; slot s is place `s % page size` of page `s // page size`.
        scale: factor on the logits, 1 / sqrt(D) when absent.
        window: a node at position `prefix + depth` sees only positions above its own minus `window`.
        softcap: logits become `softcap * tanh(logits / softcap)`.

    Returns:
        Output [T, Hq, D] in the dtype of `query`, zeros for a node that sees nothing, and log-sum-exp float32 [T, Hq]. There
        is no gradient: a backward pass through it raises.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    # Loaded when used: triton is not needed for anything else.
    from jetflow.kernels.tree_attention_triton import tree_attention_op

    scale = _check(query, key, value, bits, row_starts, prefix_lens, depths, max_nodes, block_table, scale, window, softcap)
    return tree_attention_op(
        query, key, value, bits, row_starts, prefix_lens, depths, max_nodes, max_prefix, block_table, scale, window, softcap
    )


def tree_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    row_starts: Tensor,
    prefix_lens: Tensor,
    depths: Tensor,
    *,
    max_nodes: int,
    max_prefix: int,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`tree_attention` in plain PyTorch, row by row with a dense mask, in float32."""
    scale = _check(query, key, value, bits, row_starts, prefix_lens, depths, max_nodes, block_table, scale, window, softcap)
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    for row, prefix in enumerate(prefix_lens.tolist()):
        first, last = int(row_starts[row]), int(row_starts[row + 1])
        nodes = last - first
        keys, values = (_row_slots(one, row, prefix + nodes, block_table).float() for one in (key, value))
        seen = torch.cat(
            [torch.ones(nodes, prefix, dtype=torch.bool, device=query.device), unpack_bits(bits[first:last], nodes)], dim=1
        )
        if window is not None:
            own = depths[first:last].long() + prefix
            positions = torch.cat([torch.arange(prefix, device=query.device), own])
            seen = seen & (positions[None] > (own - window)[:, None])
        group = query.shape[1] // keys.shape[0]
        queries = query[first:last].float().unflatten(1, (-1, group))
        logits = torch.einsum("nkgd,ksd->kgns", queries, keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, float("-inf"))
        sums = logits.logsumexp(-1)
        weights = (logits - sums.masked_fill(sums == float("-inf"), 0.0)[..., None]).exp()
        out[first:last] = torch.einsum("kgns,ksd->nkgd", weights, values).flatten(1, 2).to(query.dtype)
        lse[first:last] = sums.permute(2, 0, 1).flatten(1)
    return out, lse


def _row_slots(memory: Tensor, row: int, count: int, block_table: Tensor | None) -> Tensor:
    """The first `count` slots of a row, [Hk, count, D]."""
    if block_table is None:
        return memory[row, :, :count]
    page_size = memory.shape[1]
    pages = block_table[row, : -(-count // page_size)].long()
    return memory[pages].flatten(0, 1)[:count].transpose(0, 1)


def _check(
    query: Tensor, key: Tensor, value: Tensor, bits: Tensor, row_starts: Tensor, prefix_lens: Tensor, depths: Tensor,
    max_nodes: int, block_table: Tensor | None, scale: float | None, window: int | None, softcap: float | None,
) -> float:  # fmt: skip
    """Checks what can be checked without reading a tensor; returns the scale."""
    nodes, query_heads, head_dim = _shape("query", query, 3)
    _shape("key", key, 4)
    key_heads, rows = (key.shape[2] if block_table is not None else key.shape[1]), len(prefix_lens)
    if key.shape != value.shape or key.shape[-1] != head_dim:
        raise ValueError(
            f"key and value must share one shape ending in D={head_dim}, got {list(key.shape)}, {list(value.shape)}"
        )
    if block_table is None and len(key) != rows:
        raise ValueError(f"key must have {rows} rows as prefix_lens has, got {len(key)}")
    if query_heads % key_heads:
        raise ValueError(f"query heads ({query_heads}) must be a multiple of key-value heads ({key_heads})")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dimension must be in [1, {MAX_HEAD_DIM}], got {head_dim}")
    if not 1 <= max_nodes <= MAX_NODES or bits.shape[-1] * 64 < max_nodes:
        raise ValueError(
            f"max_nodes={max_nodes} must be in [1, {MAX_NODES}] and fit into bits, which hold {bits.shape[-1] * 64} nodes"
        )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key, value must be of one float dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    whole = {"row_starts": (row_starts, rows + 1), "prefix_lens": (prefix_lens, rows), "depths": (depths, nodes)}
    for name, (one, length) in whole.items():
        if one.dtype != torch.int32 or one.shape != (length,):
            raise ValueError(f"{name} must be int32 [{length}], got {one.dtype} {list(one.shape)}")
    if bits.dtype != torch.int64 or bits.shape[:-1] != (nodes,) or not bits.is_contiguous():
        raise ValueError(f"bits must be contiguous int64 [{nodes}, W], got {bits.dtype} {list(bits.shape)}")
    if block_table is not None and (block_table.dtype != torch.int32 or block_table.dim() != 2 or len(block_table) != rows):
        raise ValueError(f"block_table must be int32 [{rows}, P], got {block_table.dtype} {list(block_table.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    return head_dim**-0.5 if scale is None else scale


def _shape(name: str, tensor: Tensor, dims: int) -> tuple[int, ...]:
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    return tuple(tensor.shape)
