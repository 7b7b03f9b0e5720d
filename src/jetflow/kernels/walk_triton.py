"""Acceptance walk in Triton: one program per row, the whole tree in registers; the plain twin is `kernels.walk`.

Dimension key: B batch, N nodes, P path length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _walk(
    tokens_ptr, parents_ptr, counts_ptr, chosen_ptr, path_ptr, accepted_ptr, bonus_ptr, N, max_depth, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    used = n < tl.load(counts_ptr + row)
    tokens = tl.load(tokens_ptr + row * N + n, mask=used, other=-1)
    parents = tl.load(parents_ptr + row * N + n, mask=used, other=-1)
    path = path_ptr + row * (max_depth + 1)
    node = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)
    want = tl.load(chosen_ptr + row * N)
    tl.store(path, node.to(tl.int64))
    for level in range(max_depth):
        child = tl.max(tl.where(used & (parents == node) & (tokens == want), n, -1), 0)
        found = child >= 0
        node = tl.where(found, child, node)
        accepted += found.to(tl.int32)
        want = tl.load(chosen_ptr + row * N + node)
        tl.store(path + level + 1, node.to(tl.int64))
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(bonus_ptr + row, want)


@torch.library.custom_op("jetflow::accept_walk", mutates_args=())
def accept_walk_op(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, chosen: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the kernel; arguments are checked by `accept_walk`."""
    rows, nodes = tokens.shape
    path, accepted, bonus = tokens.new_empty(rows, max_depth + 1), torch.empty_like(num_nodes), torch.empty_like(num_nodes)
    _walk[(rows,)](
        tokens.contiguous(), parents.contiguous(), num_nodes.contiguous(), chosen.contiguous(), path, accepted, bonus,
        nodes, max_depth, BLOCK=triton.next_power_of_2(nodes), num_warps=1 if nodes <= 64 else 4,
    )  # fmt: skip
    return path, accepted, bonus


@accept_walk_op.register_fake
def _shapes(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, chosen: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch.compile needs to know of the op."""
    return tokens.new_empty(len(tokens), max_depth + 1), torch.empty_like(num_nodes), torch.empty_like(num_nodes)
