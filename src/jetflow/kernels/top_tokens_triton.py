"""The likeliest tokens in Triton, in two launches; the plain twin is `kernels.top_tokens`.

    1. Each program reads one chunk of one law: its maximum, its sum of exponentials, and its K best, taken out one by one.
    2. One program per law joins the chunks: the log of the whole sum, and the K best of the chunks' best.

Dimension key: R laws, V vocabulary, K tokens, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048


@triton.jit
def _take(values, ids, free):
    """The largest value that is free, and of the ids that have it the lowest."""
    shown = tl.where(free, values, float("-inf"))
    best = tl.max(shown, 0)
    return best, tl.min(tl.where(free & (shown == best), ids, 2147483647), 0)


@triton.jit
def _chunks(logits_ptr, value_ptr, id_ptr, max_ptr, sum_ptr, row_stride, V, num_chunks, K: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = ids < V
    values = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids, mask=valid, other=float("-inf")).to(tl.float32)
    highest = tl.max(values, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    part = row * num_chunks + chunk
    tl.store(max_ptr + part, highest)
    tl.store(sum_ptr + part, tl.sum(tl.exp(values - safe), 0))
    # Ids that were taken must not come again, even where all that is left is -inf.
    free = valid
    for k in range(K):
        best, token = _take(values, ids, free)
        tl.store(value_ptr + part * K + k, best)
        tl.store(id_ptr + part * K + k, token)
        free = free & (ids != token)


@triton.jit
def _join(
    value_ptr, id_ptr, max_ptr, sum_ptr, token_ptr, log_prob_ptr, num_chunks,
    K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    there = c < num_chunks
    maxima = tl.load(max_ptr + row * num_chunks + c, mask=there, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_chunks + c, mask=there, other=0.0)
    highest = tl.max(maxima, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    log_sum = safe + tl.log(tl.sum(sums * tl.exp(tl.where(there, maxima, float("-inf")) - safe), 0))
    i = tl.arange(0, BLOCK)
    free = i < num_chunks * K
    values = tl.load(value_ptr + row * num_chunks * K + i, mask=free, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_chunks * K + i, mask=free, other=2147483647)
    for k in range(K):
        best, token = _take(values, ids, free)
        tl.store(token_ptr + row * K + k, token.to(tl.int64))
        tl.store(log_prob_ptr + row * K + k, best - log_sum)
        free = free & (ids != token)


@torch.library.custom_op("jetflow::top_tokens", mutates_args=())
def top_tokens_op(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Runs the kernels; arguments are checked by `top_tokens`."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    values = logits.new_empty(rows, chunks, count, dtype=torch.float32)
    ids = logits.new_empty(rows, chunks, count, dtype=torch.int32)
    maxima, sums = (logits.new_empty(rows, chunks, dtype=torch.float32) for _ in range(2))
    tokens = logits.new_empty(rows, count, dtype=torch.int64)
    log_probs = logits.new_empty(rows, count, dtype=torch.float32)
    _chunks[(rows, chunks)](
        logits, values, ids, maxima, sums, logits.stride(0), vocab, chunks, K=count, CHUNK=CHUNK, num_warps=4
    )
    _join[(rows,)](
        values, ids, maxima, sums, tokens, log_probs, chunks, K=count, CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=triton.next_power_of_2(chunks * count), num_warps=8,
    )  # fmt: skip
    return tokens, log_probs


@top_tokens_op.register_fake
def _shapes(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What torch.compile needs to know of the op."""
    rows = len(logits)
    return logits.new_empty(rows, count, dtype=torch.int64), logits.new_empty(rows, count, dtype=torch.float32)
