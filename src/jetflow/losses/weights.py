"""Weights of the slots of a block, and the mean that they make.

Dimension key: V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exponential_position_weights(block_size: int, decay_rate: float) -> Tensor:
    """Weights of the slots of a block: `w_i = exp(-(i - 1) / decay_rate)` for slot i = 1 .. block_size - 1.

    Args:
        block_size: positions in a block, anchor included; at least 2.
        decay_rate: slots after which the weight has fallen by e; 0 means uniform weights.

    Returns:
        float32 [block_size - 1], the first weight being 1.

    Raises:
        ValueError: `block_size` is below 2, or `decay_rate` is negative or not finite.

    Example:
        >>> exponential_position_weights(4, 0.0).tolist()
        [1.0, 1.0, 1.0]
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    if not 0 <= decay_rate < math.inf:
        raise ValueError(f"decay_rate must be 0 (uniform) or a finite number above 0, got {decay_rate}")
    if decay_rate == 0:
        return torch.ones(block_size - 1)
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / decay_rate)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Returns `sum(weights * values) / sum(weights)`, or 0 with a zero gradient where all weights are 0.

    Args:
        values: float [...]; entries of weight 0 may be anything, NaN included.
        weights: float [...] of the same shape, 0 or above.

    Returns:
        A scalar of the dtype of `values`.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])).item()
        1.5
    """
    if values.shape != weights.shape:
        raise ValueError(f"weights must have the shape of values, {tuple(values.shape)}, got {tuple(weights.shape)}")
    weights = weights.to(values.dtype)
    total = weights.sum()
    weighted = torch.where(weights > 0, values, 0.0) * weights
    return weighted.sum() / torch.where(total > 0, total, 1.0)
