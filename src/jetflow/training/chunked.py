"""A loss over many slots and a large vocabulary, computed a chunk of slots at a time.

Logits, their softmax and their gradient exist for one chunk only: gradients with respect to the hidden states are taken
in the forward pass, while the chunk's logits are at hand, and scaled in the backward pass.

Dimension key: M slots, or blocks of slots, C chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (hidden states [C, ..., H], which slots they are) -> summed loss of the chunk, and detached statistics per slot [C, ..., 2].
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def chunked_sum(hidden: Tensor, loss_of_chunk: ChunkLoss, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Sums a loss over slots.

    Args:
        hidden: float [M, ..., H]; gradients reach it.
        loss_of_chunk: computes one chunk; gradients reach nothing but the hidden states that it is given.
        chunk_size: C, slots per chunk; at least 1.

    Returns:
        The summed loss, float32 scalar, and the statistics of all slots, float32 [M, ..., 2].

    Raises:
        ValueError: `chunk_size` is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return _ChunkedSum.apply(hidden, loss_of_chunk, chunk_size)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss_of_chunk: ChunkLoss, chunk_size: int) -> tuple[Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden) if needs_gradient else None
        total = hidden.new_zeros((), dtype=torch.float32)
        statistics = hidden.new_zeros(*hidden.shape[:-1], 2, dtype=torch.float32)
        for start in range(0, len(hidden), chunk_size):
            places = slice(start, min(start + chunk_size, len(hidden)))
            part = hidden[places].detach().requires_grad_(needs_gradient)
            with torch.set_grad_enabled(needs_gradient):
                value, statistics[places] = loss_of_chunk(part, places)
            if gradient is not None:
                (gradient[places],) = torch.autograd.grad(value, part)
            total += value.detach()
        ctx.gradient = gradient
        ctx.mark_non_differentiable(statistics)
        return total, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        gradient = ctx.gradient
        return None if gradient is None else gradient * grads[0].to(gradient.dtype), None, None
