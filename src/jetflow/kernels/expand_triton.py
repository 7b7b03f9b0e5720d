"""Expansion in Triton: one program per row grows all levels; the plain twin is `kernels.expand`.

    1. A level: every (slot of a parent, rank of a child) that can be kept gets one integer key, its score's bits above its
       place in the order of ties. No two keys are equal, so a bitonic network finds the best and their order.
    2. What is kept goes into a ledger in memory, which the next level and the end read.
    3. The end: the same network over the whole ledger gives the nodes, and their places give the parents.

Dimension key: B batch, D levels, R laws of a depth, K candidates of a law, M ledger entries, N nodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow.kernels.expand import ExpansionSizes, expansion_sizes, level_sizes

# Below the key of every score, -inf too.
LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _keys(scores, places, live):
    """Integers that sort like the scores, and of equal scores the lower place first; -0.0 equals 0.0 and NaN comes first."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7F800000, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, (bits.to(tl.int64) << 32) - places, LOWEST)


@triton.jit
def _places(keys, live):
    return tl.where(live, -keys & 0xFFFFFFFF, 0).to(tl.int32)


@triton.jit
def _merge(keys, stage, LOG_N: tl.constexpr):
    """Sorts bitonic runs of 2^stage keys, falling and rising by turns; a single run falls."""
    c = tl.arange(0, 2**LOG_N)
    falls = ((c >> stage) & 1) ^ 1
    for step in range(stage):
        bit = stage - 1 - step
        other = tl.gather(keys, c ^ (1 << bit), 0)
        keys = tl.where((keys > other) == ((((c >> bit) & 1) ^ falls) != 0), keys, other)
    return keys


@triton.jit
def _largest(keys, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """The 2^LOG_K largest of 2^LOG_N keys, largest first: runs of that size are sorted, then halved until one is left."""
    for stage in range(1, LOG_K + 1):
        keys = _merge(keys, stage, LOG_N)
    for done in tl.static_range(LOG_N - LOG_K):
        # A falling and a rising run side by side: the larger of each pair are the best of both.
        pairs = tl.reshape(keys, [2 ** (LOG_N - done - 1 - LOG_K), 2, 2**LOG_K])
        keys = _merge(tl.reshape(tl.max(pairs, 1), [2 ** (LOG_N - done - 1)]), LOG_K, LOG_N - done - 1)
    return keys


@triton.jit
def _expand(
    root_ptr, token_ptr, law_ptr, column_ptr, tokens_out, parents_out, depths_out, scores_out, counts_out,
    kept_token_ptr, kept_score_ptr, kept_parent_ptr, kept_column_ptr, kept_depth_ptr, place_ptr,
    levels, K, budget, M, N, R: tl.constexpr, LOG_KEEP: tl.constexpr, LOG_RANKS: tl.constexpr, LOG_CANDIDATES: tl.constexpr,
    LOG_ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kept_token_ptr += row * M
    kept_score_ptr += row * M
    kept_parent_ptr += row * M
    kept_column_ptr += row * M
    kept_depth_ptr += row * M
    place_ptr += row * M
    root = tl.load(root_ptr + row)
    tl.store(kept_score_ptr, 0.0)
    tl.store(kept_column_ptr, 0)
    tl.debug_barrier()
    c = tl.arange(0, 2**LOG_CANDIDATES)
    if R == 1:
        group, within = c >> LOG_KEEP, c & (2**LOG_KEEP - 1)
        slot, rank = within >> group, (within & ((1 << group) - 1)) + (1 << group) - 1
    else:
        slot, rank = c >> LOG_RANKS, c & (2**LOG_RANKS - 1)
    i = tl.arange(0, 2**LOG_KEEP)
    size, start = 1, 0
    for level in range(1, levels + 1):
        live = (slot < size) & (rank < K)
        laws = (row * levels + level - 1).to(tl.int64) * R * K
        law = laws + rank
        if R > 1:
            law += tl.load(kept_column_ptr + start + slot, mask=live, other=0) * K
        above = tl.load(kept_score_ptr + start + slot, mask=live, other=0.0)
        scores = above + tl.load(law_ptr + law, mask=live, other=0.0)
        best = _largest(_keys(scores, slot * K + rank, live), LOG_CANDIDATES, LOG_KEEP)

        kept = tl.minimum(budget - level, size * K)
        on = i < kept
        place = _places(best, on)
        parent = start + place // K
        chosen = laws + place % K
        if R > 1:
            chosen += tl.load(kept_column_ptr + parent, mask=on, other=0) * K
        score = tl.load(kept_score_ptr + parent, mask=on, other=0.0) + tl.load(law_ptr + chosen, mask=on, other=0.0)
        entry = start + size + i
        tl.store(kept_token_ptr + entry, tl.load(token_ptr + chosen, mask=on, other=0), mask=on)
        tl.store(kept_score_ptr + entry, score, mask=on)
        tl.store(kept_parent_ptr + entry, parent, mask=on)
        tl.store(kept_depth_ptr + entry, tl.full([2**LOG_KEEP], 0, tl.int32) + level, mask=on)
        if R > 1:
            tl.store(kept_column_ptr + entry, tl.load(column_ptr + chosen, mask=on, other=0).to(tl.int32), mask=on)
        start += size
        size = kept
        # The next level reads what other threads have written.
        tl.debug_barrier()

    e = tl.arange(0, 2**LOG_ENTRIES)
    there = e < M - 1
    keys = _keys(tl.load(kept_score_ptr + 1 + e, mask=there, other=0.0), e, there)
    best = _largest(keys, LOG_ENTRIES, LOG_KEEP)
    on = i < N - 1
    entry = _places(best, on) + 1
    tl.store(place_ptr + entry, i + 1, mask=on)
    tl.debug_barrier()
    score = tl.load(kept_score_ptr + entry, mask=on, other=float("-inf"))
    exists = on & (score != float("-inf"))
    parent = tl.load(place_ptr + tl.load(kept_parent_ptr + entry, mask=exists, other=0), mask=exists, other=-1)
    out = row * N + 1 + i
    tl.store(tokens_out + out, tl.load(kept_token_ptr + entry, mask=exists, other=0), mask=on)
    tl.store(parents_out + out, tl.where(exists, parent, -1).to(tl.int64), mask=on)
    tl.store(depths_out + out, tl.load(kept_depth_ptr + entry, mask=exists, other=0).to(tl.int64), mask=on)
    tl.store(scores_out + out, score, mask=on)
    tl.store(tokens_out + row * N, root)
    tl.store(parents_out + row * N, tl.full([], -1, tl.int64))
    tl.store(depths_out + row * N, tl.full([], 0, tl.int64))
    tl.store(scores_out + row * N, 0.0)
    tl.store(counts_out + row, (tl.sum(exists.to(tl.int32), 0) + 1).to(tl.int64))


def num_warps(sizes: ExpansionSizes) -> int:
    """Warps of a program: four keys for each thread; where that takes too many registers, few warps that may use more."""
    keys = max(sizes.candidates, sizes.entries)
    return min(32, max(4, keys // 128)) if keys <= 4096 else 8


@torch.library.custom_op("jetflow::expand_tree", mutates_args=())
def expand_tree_op(
    root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, columns: Tensor | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the kernel; arguments are checked by `expand_tree`."""
    batch, levels, laws, width = tokens.shape
    sizes = expansion_sizes(levels, laws, width, budget)
    outputs = _outputs(root_tokens, tokens, log_probs, columns, budget)
    entries = sum(level_sizes(levels, width, budget))
    kept_tokens, kept_scores = tokens.new_empty(batch, entries), log_probs.new_empty(batch, entries)
    parents, kept_columns, depths = (tokens.new_empty(batch, entries, dtype=torch.int32) for _ in range(3))
    # Zeros, not empty: under NaN laws a node may stand without its parent, which then is the root.
    places = tokens.new_zeros(batch, entries, dtype=torch.int32)
    tokens, log_probs = tokens.contiguous(), log_probs.contiguous()
    _expand[(batch,)](
        root_tokens.contiguous(), tokens, log_probs, tokens if columns is None else columns.contiguous(), *outputs,
        kept_tokens, kept_scores, parents, kept_columns, depths, places, levels, width, budget, entries, outputs[0].shape[1],
        R=laws, LOG_KEEP=sizes.keep.bit_length() - 1, LOG_RANKS=sizes.ranks.bit_length() - 1,
        LOG_CANDIDATES=sizes.candidates.bit_length() - 1, LOG_ENTRIES=sizes.entries.bit_length() - 1,
        num_warps=num_warps(sizes),
    )  # fmt: skip
    return outputs


@expand_tree_op.register_fake
def _outputs(
    root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, columns: Tensor | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs, not filled, which is also what torch.compile needs to know of the op."""
    batch, levels, _, width = tokens.shape
    nodes = min(budget, sum(level_sizes(levels, width, budget)))
    whole = [tokens.new_empty(batch, nodes) for _ in range(3)]
    return whole[0], whole[1], whole[2], log_probs.new_empty(batch, nodes), tokens.new_empty(batch)
