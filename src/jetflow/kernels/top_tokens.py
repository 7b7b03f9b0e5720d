"""The likeliest tokens of each law with their log-probabilities, in one sweep over the vocabulary.

`top_tokens` runs in Triton: logits are read once, and neither a float32 copy of them nor a softmax over the vocabulary is
made. `top_tokens_reference` is its plain PyTorch twin with the same signature.

Dimension key: R laws, V vocabulary, K tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.trees.ranking import likeliest_tokens

MAX_COUNT = 128


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Takes the `count` likeliest tokens of each law; equal logits go to the lower id.

    Args:
        logits: float16, bfloat16 or float32 [R, V], rows contiguous.
        count: K, at most 128 and at most V.

    Returns:
        Tokens int64 [R, K], best first, and their log-probabilities over the whole vocabulary, float32 [R, K].

    Raises:
        ValueError: shapes or dtypes do not fit, or `count` is out of its range.
    """
    from jetflow.kernels.top_tokens_triton import top_tokens_op

    _check(logits, count)
    return top_tokens_op(logits, count)


def top_tokens_reference(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`top_tokens` in plain PyTorch."""
    _check(logits, count)
    wide = logits.float()
    tokens = likeliest_tokens(wide, count)
    return tokens, wide.gather(-1, tokens) - wide.logsumexp(-1, keepdim=True)


def _check(logits: Tensor, count: int) -> None:
    if logits.dim() != 2 or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32) or logits.stride(1) != 1:
        raise ValueError(f"logits must be floats [R, V] with contiguous rows, got {logits.dtype} {list(logits.shape)}")
    if not 1 <= count <= min(MAX_COUNT, logits.shape[1]):
        raise ValueError(f"count must be in [1, {min(MAX_COUNT, logits.shape[1])}], got {count}")
