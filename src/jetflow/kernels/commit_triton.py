"""Commit in Triton: one program per layer (keys or values), row and head; the plain twin is `kernels.commit`.

Dimension key: A layers times two, B rows, H heads, S slots, D head dimension, P path length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _slot_offset(table_ptr, row, table_stride, slot, row_stride, page_stride, slot_stride, PAGE: tl.constexpr):
    if PAGE == 0:
        offset = row.to(tl.int64) * row_stride + slot.to(tl.int64) * slot_stride
    else:
        page = tl.load(table_ptr + row * table_stride + slot // PAGE).to(tl.int64)
        offset = page * page_stride + (slot % PAGE).to(tl.int64) * slot_stride
    return offset


@triton.jit
def _commit(
    memory_ptr, path_ptr, starts_ptr, counts_ptr, table_ptr, path_stride, table_stride,
    m_a, m_row, m_head, m_page, m_slot, m_d, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    part, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts_ptr + row), tl.load(counts_ptr + row)
    base = memory_ptr + part.to(tl.int64) * m_a + head.to(tl.int64) * m_head
    d = tl.arange(0, BLOCK_D)
    for place in range(count):
        node = tl.load(path_ptr + row * path_stride + place).to(tl.int32)
        if node != place:
            source = _slot_offset(table_ptr, row, table_stride, start + node, m_row, m_page, m_slot, PAGE)
            target = _slot_offset(table_ptr, row, table_stride, start + place, m_row, m_page, m_slot, PAGE)
            values = tl.load(base + source + d * m_d, mask=d < D, other=0.0)
            tl.store(base + target + d * m_d, values, mask=d < D)


@torch.library.custom_op("jetflow::commit_path", mutates_args=("memory",))
def commit_path_op(memory: Tensor, path: Tensor, starts: Tensor, counts: Tensor, block_table: Tensor | None) -> None:
    """Runs the kernel; arguments are checked by `commit_path`."""
    paged = block_table is not None
    parts, rows, heads = len(memory), len(path), memory.shape[3] if paged else memory.shape[2]
    page = memory.shape[2] if paged else 0
    row_stride = 0 if paged else memory.stride(1)
    page_stride = memory.stride(1) if paged else 0
    slot_stride, head_stride = (memory.stride(2), memory.stride(3)) if paged else (memory.stride(3), memory.stride(2))
    table = starts if block_table is None else block_table
    path = path.contiguous()
    _commit[(parts, rows, heads)](
        memory, path, starts, counts, table, path.stride(0), table.stride(0), memory.stride(0), row_stride, head_stride,
        page_stride, slot_stride, memory.stride(4), D=memory.shape[4], BLOCK_D=triton.next_power_of_2(memory.shape[4]),
        PAGE=page, num_warps=1,
    )  # fmt: skip


@commit_path_op.register_fake
def _no_result(memory: Tensor, path: Tensor, starts: Tensor, counts: Tensor, block_table: Tensor | None) -> None:
    """What torch.compile needs to know of the op."""
