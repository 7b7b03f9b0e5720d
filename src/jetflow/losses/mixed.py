"""Several losses as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from jetflow.protocols import Loss


class MixedLoss:
    """The weighted sum of several losses, position by position.

    Args:
        losses: at least two.
        weights: one for each, above 0.

    Raises:
        ValueError: fewer than two losses, or weights that do not fit.

    Example:
        >>> from jetflow.losses import ForwardKL, TreeAcceptance
        >>> loss = MixedLoss([ForwardKL(), TreeAcceptance(budget=16)], [1.0, 0.5])
        >>> loss.uses_path
        True
    """

    def __init__(self, losses: Sequence[Loss], weights: Sequence[float]):
        if len(losses) < 2 or len(losses) != len(weights):
            raise ValueError(f"losses must be at least two with a weight each, got {len(losses)} and {len(weights)} weights")
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be above 0 and finite, got {list(weights)}")
        self._losses, self._weights = list(losses), list(weights)
        self.uses_target = any(getattr(loss, "uses_target", True) for loss in losses)
        self.uses_path = any(getattr(loss, "uses_path", False) for loss in losses)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        """Returns float32 [...]; arguments and errors are those of the losses."""
        values = [loss(draft_logits, target_logits, labels) for loss in self._losses]
        weighted = [value * weight for value, weight in zip(values, self._weights, strict=True)]
        return sum(weighted[1:], weighted[0])
