"""Commit: the keys and values of an accepted path move behind the prefix, all layers in one launch, in place.

`commit_path` runs in Triton, `commit_path_reference` is its plain PyTorch twin with the same signature.

A path's nodes rise in index, and node i of it lies at or behind place i; so copying place by place, first to last, never
overwrites what is still to be read.

Dimension key: A layers times two (keys and values), B rows, H heads, S slots, D head dimension, P path length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.kernels import dispatch


def commit_path(memory: Tensor, path: Tensor, starts: Tensor, counts: Tensor, *, block_table: Tensor | None = None) -> None:
    """Moves slot `starts[b] + path[b, i]` of every row to slot `starts[b] + i`, for the first `counts[b]` nodes.

    Args:
        memory: float [A, B, H, S, D] of any strides, or with a block table [A, pages, page size, H, D]; changed in place.
        path: int64 [B, P], node indices, rising, root (0) first.
        starts: int32 [B], committed tokens of each row.
        counts: int32 [B], nodes to keep, root included; at most P.
        block_table: int32 [B, pages of a row].

    Raises:
        ValueError: shapes or dtypes do not fit, or `memory` requires gradients.
    """
    # Loaded when used: triton is not needed for anything else.
    from jetflow.kernels.commit_triton import commit_path_op

    _check(memory, path, starts, counts, block_table)
    commit_path_op(memory, path, starts, counts, block_table)


def commit_rows(
    memory: Tensor, path: Tensor, lengths: list[int], num_tokens: list[int], block_table: Tensor | None = None
) -> None:
    """What both caches call: `commit_path` or its twin, for rows of `lengths` committed tokens that keep `num_tokens` nodes."""
    starts, counts = (torch.tensor(one, dtype=torch.int32, device=memory.device) for one in (lengths, num_tokens))
    commit = commit_path if dispatch.runs_kernels(memory) else commit_path_reference
    commit(memory, path.to(memory.device), starts, counts, block_table=block_table)


def commit_path_reference(
    memory: Tensor, path: Tensor, starts: Tensor, counts: Tensor, *, block_table: Tensor | None = None
) -> None:
    """`commit_path` in plain PyTorch, row by row; reads all before it writes."""
    _check(memory, path, starts, counts, block_table)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        nodes = path[row, :count]
        if nodes.tolist() == list(range(count)):
            # A path of the first nodes lies where it belongs.
            continue
        source = nodes + start
        target = torch.arange(start, start + count, device=memory.device)
        if block_table is None:
            memory[:, row, :, target] = memory[:, row, :, source]
        else:
            size, table = memory.shape[2], block_table[row].long()
            memory[:, table[target // size], target % size] = memory[:, table[source // size], source % size]


def _check(memory: Tensor, path: Tensor, starts: Tensor, counts: Tensor, block_table: Tensor | None) -> None:
    if memory.dim() != 5:
        raise ValueError(f"memory must have 5 dimensions, got {list(memory.shape)}")
    if memory.requires_grad:
        raise ValueError("memory must not require gradients, as a commit has none")
    rows = len(path)
    if path.dim() != 2 or path.dtype != torch.int64:
        raise ValueError(f"path must be int64 [B, P], got {path.dtype} {list(path.shape)}")
    if block_table is None and memory.shape[1] != rows:
        raise ValueError(f"memory must have {rows} rows as path has, got {memory.shape[1]}")
    for name, one in (("starts", starts), ("counts", counts)):
        if one.dtype != torch.int32 or one.shape != (rows,):
            raise ValueError(f"{name} must be int32 [{rows}], got {one.dtype} {list(one.shape)}")
    if block_table is not None and (block_table.dtype != torch.int32 or block_table.dim() != 2 or len(block_table) != rows):
        raise ValueError(f"block_table must be int32 [{rows}, P], got {block_table.dtype} {list(block_table.shape)}")
