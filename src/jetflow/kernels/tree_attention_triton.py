"""Tree attention in Triton: no mask of nodes by keys exists anywhere. The plain twin is `kernels.tree_attention`.

Layout of one program: a tile of BLOCK_M rows, where row m is node m // G and query head m % G of one key-value head, so
that the G heads that share keys read them once; over one split of the row's prefix.
    1. Prefix keys are visible to all nodes: their tiles run without a mask, but under a window.
    2. The last split goes on into the tree keys: words of bits say which of them a node sees.
    3. Each split leaves its own output and log-sum-exp; a second kernel combines them. Splits begin at multiples of
       SPLIT, whatever the other rows of the batch are, so that a row's result does not depend on them.

Dimension key: T nodes of all trees, Hq query heads, Hk key-value heads, G = Hq / Hk, S slots, D head dimension, W words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow.kernels.tree_attention import SPLIT


@triton.jit
def _offsets(table_ptr, row, table_stride, slot, page_stride, slot_stride, valid, PAGE: tl.constexpr):
    """Offsets of slots within key or value memory: a page's own and the place within it, or a plain stride."""
    if PAGE == 0:
        offsets = slot * slot_stride
    else:
        page = tl.load(table_ptr + row * table_stride + slot // PAGE, mask=valid, other=0).to(tl.int64)
        offsets = page * page_stride + (slot % PAGE) * slot_stride
    return offsets


@triton.jit
def _visible(
    bits_ptr, depth_ptr, place, depth, begin, prefix, start, count, s, window,
    WORDS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Which slots of a tile each row sees: the prefix, and of the tree what its words say; at most two words a tile."""
    key = begin + s - prefix
    base = tl.maximum(begin - prefix, 0) // 64
    words = bits_ptr + place.to(tl.int64) * WORDS
    word = tl.load(words + base)
    if WORDS > 1:
        # Behind the last word there are no keys that could be visible.
        following = tl.load(words + tl.minimum(base + 1, WORDS - 1))
        word = tl.where((key // 64 == base)[None, :], word[:, None], following[:, None])
    else:
        word = word[:, None]
    own = ((word >> (key % 64).to(tl.int64)[None, :]) & 1) != 0
    seen = (key < 0)[None, :] | (own & (key < count)[None, :])
    if WINDOW:
        position = key
        inside = (key >= 0) & (key < count)
        position = tl.where(key < 0, key, tl.load(depth_ptr + start + key, mask=inside, other=0))
        seen = seen & (position[None, :] > (depth - window)[:, None])
    return seen


@triton.jit
def _capped(logits, softcap):
    """`softcap * tanh(logits / softcap)`, by exp, which the interpreter and every chip have."""
    e = tl.exp(2.0 * tl.minimum(tl.maximum(logits / softcap, -15.0), 15.0))
    return softcap * (e - 1.0) / (e + 1.0)


@triton.jit
def _softmax_step(logits, best, total):
    """Online softmax: new maximum and sum of each row, the factor for what was summed before, and the new weights."""
    higher = tl.maximum(best, tl.max(logits, 1))
    # A row that has seen nothing yet keeps -inf; 0 in its place keeps exp away from inf - inf.
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(logits - safe[:, None])
    shrink = tl.exp(best - safe)
    return higher, total * shrink + tl.sum(weights, 1), shrink, weights


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, bits_ptr, starts_ptr, prefix_ptr, depth_ptr, table_ptr, out_ptr, lse_ptr,
    q_t, q_h, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, table_b, out_z, out_t, out_h, lse_z, lse_t,
    scale, softcap, window, num_splits,
    G: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, split = tl.program_id(2) // num_splits, tl.program_id(2) % num_splits
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    prefix = tl.load(prefix_ptr + row)
    used = tl.maximum((prefix + SPLIT - 1) // SPLIT, 1)
    if (tile * BLOCK_M >= count * G) | (split >= used):
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < count * G
    place = start + tl.where(live, m // G, 0)
    query_head = head * G + m % G
    d = tl.arange(0, BLOCK_D)
    q_mask = live[:, None]
    if D < BLOCK_D:
        q_mask = q_mask & (d < D)[None, :]
    q_offsets = place.to(tl.int64)[:, None] * q_t + query_head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    depth = tl.load(depth_ptr + place)
    k_base, v_base = k_ptr + head * k_h, v_ptr + head * v_h
    if PAGE == 0:
        k_base, v_base = k_base + row.to(tl.int64) * k_b, v_base + row.to(tl.int64) * v_b
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    s = tl.arange(0, BLOCK_S)

    # The last split goes on into the tree.
    low, high = split * SPLIT, split * SPLIT + SPLIT
    if split == used - 1:
        high = prefix + count
    if WINDOW:
        # The root reaches back furthest; whole tiles before its window are not read.
        low = tl.maximum(low, tl.maximum(prefix - window + 1, 0) // BLOCK_S * BLOCK_S)
    for begin in range(low, high, BLOCK_S):
        slot = begin + s
        valid = slot < high
        inside = valid[:, None]
        if D < BLOCK_D:
            inside = inside & (d < D)[None, :]
        k_offsets = _offsets(table_ptr, row, table_b, slot, k_b, k_s, valid, PAGE)
        k = tl.load(k_base + k_offsets[:, None] + d[None, :] * k_d, mask=inside, other=0.0)
        if WIDE:
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            logits = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            logits = _capped(logits, softcap)
        # Prefix tiles need no mask but under a window.
        if WINDOW | (begin + BLOCK_S > prefix):
            seen = _visible(
                bits_ptr, depth_ptr, place, depth, begin, prefix, start, count, s, window, WORDS, WINDOW, BLOCK_S
            )  # fmt: skip
            logits = tl.where(seen, logits, float("-inf"))
        best, total, shrink, weights = _softmax_step(logits, best, total)
        v_offsets = _offsets(table_ptr, row, table_b, slot, v_b, v_s, valid, PAGE)
        v = tl.load(v_base + v_offsets[:, None] + d[None, :] * v_d, mask=inside, other=0.0)
        if WIDE:
            acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
    something = total > 0
    acc = acc / tl.where(something, total, 1.0)[:, None]
    lse = tl.where(something, best + tl.log(tl.where(something, total, 1.0)), float("-inf"))
    rows = place.to(tl.int64)
    out = out_ptr + split * out_z + rows[:, None] * out_t + query_head[:, None] * out_h + d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(lse_ptr + split * lse_z + rows * lse_t + query_head, lse, mask=live)


@triton.jit
def _combine(
    part_ptr, part_lse_ptr, starts_ptr, prefix_ptr, out_ptr, lse_ptr, part_z, part_t, part_h, lse_z, lse_t, out_t, out_h,
    D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one node and head; those that the row did not use are never read."""
    row, node, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + row)
    if node >= tl.load(starts_ptr + row + 1) - start:
        return
    place = (start + node).to(tl.int64)
    used = tl.maximum((tl.load(prefix_ptr + row) + SPLIT - 1) // SPLIT, 1)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(used):
        lse = tl.load(part_lse_ptr + split * lse_z + place * lse_t + head)
        part = tl.load(part_ptr + split * part_z + place * part_t + head * part_h + d, mask=d < D, other=0.0)
        higher = tl.maximum(best, lse)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp(lse - safe), tl.exp(best - safe)
        acc, total, best = acc * shrink + part * weight, total * shrink + weight, higher
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * out_t + head * out_h + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)
    lse = tl.where(total > 0, best + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + place * lse_t + head, lse)


class Tiles(NamedTuple):
    """Sizes of a program: rows of a tile (nodes times query heads of a group), keys, padded head dimension, and warps."""

    block_m: int
    block_s: int
    block_d: int
    num_warps: int


def tile_sizes(max_nodes: int, group: int, head_dim: int) -> Tiles:
    """Chooses the sizes for a shape. They depend on nothing that changes from round to round but the number of nodes."""
    block_m = min(64, max(16, triton.next_power_of_2(max_nodes * group)))
    block_d = max(16, triton.next_power_of_2(head_dim))
    return Tiles(block_m, 32 if block_d >= 64 else 64, block_d, 8 if block_m * block_d >= 64 * 128 else 4)


def launch_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, bits: Tensor, row_starts: Tensor, prefix_lens: Tensor, depths: Tensor,
    max_nodes: int, max_prefix: int, block_table: Tensor | None, scale: float, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the kernels; arguments are checked by `tree_attention`, which calls this as an op. It has no gradient.

    Returns:
        Output [T, Hq, D] in the dtype of `query`, and log-sum-exp float32 [T, Hq].
    """
    nodes, query_heads, head_dim = query.shape
    # Paged memory is [pages, page size, Hk, D], contiguous memory [B, Hk, S, D].
    paged = block_table is not None
    page = key.shape[1] if paged else 0
    key_heads = key.shape[2] if paged else key.shape[1]
    group, rows = query_heads // key_heads, len(prefix_lens)
    order = (0, 2, 1, 3) if paged else (0, 1, 2, 3)
    k_strides, v_strides = ([one.stride(axis) for axis in order] for one in (key, value))
    num_splits = max(1, -(-max_prefix // SPLIT))
    out, lse = (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        query.new_empty(nodes, query_heads, dtype=torch.float32),
    )
    split = num_splits > 1
    part = query.new_empty(num_splits, *query.shape, dtype=torch.float32) if split else out[None]
    part_lse = query.new_empty(num_splits, nodes, query_heads, dtype=torch.float32) if split else lse[None]
    tiles = tile_sizes(max_nodes, group, head_dim)
    grid = (triton.cdiv(max_nodes * group, tiles.block_m), key_heads, rows * num_splits)
    table = prefix_lens if block_table is None else block_table
    _attend[grid](
        query, key, value, bits, row_starts, prefix_lens, depths, table, part, part_lse,
        *query.stride(), *k_strides, *v_strides, table.stride(0), part.stride(0), part.stride(1), part.stride(2),
        part_lse.stride(0), part_lse.stride(1), scale, softcap or 1.0, window or 0, num_splits,
        G=group, D=head_dim, WORDS=bits.shape[1], PAGE=page, SPLIT=SPLIT, BLOCK_M=tiles.block_m,
        BLOCK_S=tiles.block_s, BLOCK_D=tiles.block_d, num_warps=tiles.num_warps,
        WINDOW=window is not None, SOFTCAP=softcap is not None, WIDE=query.dtype == torch.float32,
    )  # fmt: skip
    if split:
        _combine[(rows, max_nodes, query_heads)](
            part, part_lse, row_starts, prefix_lens, out, lse, part.stride(0), part.stride(1), part.stride(2),
            part_lse.stride(0), part_lse.stride(1), out.stride(0), out.stride(1),
            D=head_dim, SPLIT=SPLIT, BLOCK_D=tiles.block_d,
        )  # fmt: skip
    return out, lse


tree_attention_op = torch.library.custom_op(
    "jetflow::tree_attention",
    launch_tree_attention,
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor bits, Tensor row_starts, Tensor prefix_lens, Tensor depths, "
        "int max_nodes, int max_prefix, Tensor? block_table, float scale, int? window, float? softcap) -> (Tensor, Tensor)"
    ),
)


@tree_attention_op.register_fake
def _shapes(query: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    """What torch.compile needs to know of the op."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)
