"""Losses on the probability that a draft token is accepted: the overlap `sum_v min(p(v), q(v))` of the two laws.

p is the target's law, q the draft's. A token drawn from q is accepted by speculative sampling with just this probability.

Dimension key: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.losses.divergences import both_log_probs, checked_temperature

# Below every log-probability that logits of a working model give, so that a gradient is left where laws hardly meet.
LOG_OVERLAP_FLOOR = -1e4


class TotalVariation:
    """Total variation distance per position: `sum_v |p(v) - q(v)| / 2`, the probability that a draft token is rejected.

    Args:
        temperature: both logits are divided by it; above 0.

    Raises:
        ValueError: `temperature` is not a finite number above 0.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.2, 0.5, 0.3]]).log()
        >>> round(TotalVariation()(q, p, torch.tensor([0])).item(), 4)
        0.3
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = checked_temperature(temperature)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Compares the two laws; arguments, result and errors as for `ForwardKL`."""
        draft_log_probs, target_log_probs = both_log_probs(draft_logits, target_logits, labels, self.temperature)
        return 0.5 * (draft_log_probs.exp() - target_log_probs.exp()).abs().sum(-1)


class LogAcceptance:
    """Negative log of the acceptance probability per position: `-log sum_v min(p(v), q(v))`, the LK loss.

    With a target that is certain of one token this is cross-entropy. It is computed from log-probabilities, floored at
    -10,000, so that loss and gradient are finite, and the gradient is not zero where probabilities underflow.

    Args:
        temperature: both logits are divided by it; above 0.

    Raises:
        ValueError: `temperature` is not a finite number above 0.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.2, 0.5, 0.3]]).log()
        >>> round(LogAcceptance()(q, p, torch.tensor([0])).exp().item(), 4)
        1.4286
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = checked_temperature(temperature)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Compares the two laws; arguments, result and errors as for `ForwardKL`."""
        draft_log_probs, target_log_probs = both_log_probs(draft_logits, target_logits, labels, self.temperature)
        smaller = torch.minimum(draft_log_probs, target_log_probs).clamp(min=LOG_OVERLAP_FLOOR)
        # The first term is 0 but for rounding, which it takes out of the second: equal laws give exactly 0.
        return draft_log_probs.clamp(min=LOG_OVERLAP_FLOOR).logsumexp(-1) - smaller.logsumexp(-1)
