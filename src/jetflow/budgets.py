"""Budget policies: how many nodes of a drafted tree are worth verifying.

Dimension key: B batch, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


class ThroughputBudget:
    """Picks the tree size that maximises expected tokens per second, round by round.

    The best n nodes of a tree are expected to commit tau(n) tokens, the sum of their probabilities (DDTree, arXiv
    2604.12989, Proposition 1); with T(n) the seconds of a round that verifies n nodes, the choice is the n with the
    largest tau(n) / T(n). T is a staircase on real machines, so every measured size is tried.

    Args:
        round_seconds: seconds of a whole round (draft, verify and all) by number of verified nodes, as measured on the
            machine at hand.

    Raises:
        ValueError: no size is given, or a size or time is not positive.

    Example:
        >>> import torch
        >>> policy = ThroughputBudget({1: 1.0, 2: 1.1, 4: 3.0})
        >>> policy(torch.tensor([[0.0, -0.1, -2.0, -3.0]]), [])
        2
    """

    def __init__(self, round_seconds: Mapping[int, float]):
        if not round_seconds:
            raise ValueError("round_seconds must hold at least one size")
        for size, seconds in round_seconds.items():
            if size < 1 or not seconds > 0:
                raise ValueError(f"round_seconds[{size}]={seconds}: sizes must be at least 1 and seconds positive")
        self._round_seconds = dict(sorted(round_seconds.items()))
        self.max_nodes = max(round_seconds)

    def __call__(self, scores: Tensor, num_accepted: Sequence[int]) -> int:
        """Returns the number of nodes to verify, from `scores` float32 [B, N], best nodes first."""
        expected = scores.exp().sum(dim=0).cumsum(dim=0).tolist()
        rates = {
            min(size, len(expected)): expected[min(size, len(expected)) - 1] / seconds
            for size, seconds in self._round_seconds.items()
        }
        return max(rates, key=lambda size: rates[size])
