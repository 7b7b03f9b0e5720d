"""Scoring functions: in which order candidates are worth a place in the tree. Higher is better.

Dimension key: B batch, F frontier slots, K candidates per parent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetflow.protocols import Candidates, ScoringFunction


def cumulative_log_prob(candidates: Candidates) -> Tensor:
    """The log-probability of the path from the root: the best nodes maximise the expected acceptance length.

    DDTree (arXiv 2604.12989), Propositions 1 and 2; `accum_logp` of JetSpec (arXiv 2606.18394), Table 10.
    """
    return candidates.cum_log_probs


class EntropyGuided:
    """Prefers children of sharp laws: minus the entropy of the law that a candidate comes from.

    The entropy is that of the offered candidates, with all other tokens counted as one outcome, in nats. A path is
    worth its least sharp law, as a child never ranks above its parent; siblings tie and go by rank. The `entropy` row
    of JetSpec (arXiv 2606.18394), Table 10, is the same idea; it is there to be compared with, not to be used.
    """

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        return (-law_entropy(candidates.log_probs)).expand_as(candidates.log_probs)


class Hybrid:
    """The weighted sum of cumulative log-probability and entropy: `cum_log_prob - entropy_weight * entropy`.

    The `hybrid` rows of JetSpec (arXiv 2606.18394), Table 10, whose alpha is the weight. As in `EntropyGuided`, the
    entropy is that of the law a candidate comes from, not summed along the path, and sharper laws are preferred.

    Args:
        entropy_weight: weight of the entropy, in nats per nat; 0 gives `cumulative_log_prob`.

    Raises:
        ValueError: the weight is negative or not finite.

    Example:
        >>> from jetflow import BestFirst
        >>> expander = BestFirst(Hybrid(0.25))
    """

    def __init__(self, entropy_weight: float):
        if not 0 <= entropy_weight < math.inf:
            raise ValueError(f"entropy_weight must be at least 0 and finite, got {entropy_weight}")
        self.entropy_weight = entropy_weight

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        return candidates.cum_log_probs - self.entropy_weight * law_entropy(candidates.log_probs)


class DepthPenalty:
    """Takes `penalty` nats off per level, which makes trees wider; a negative penalty makes them deeper.

    Args:
        penalty: nats per level.
        base: the score it is taken from.

    Raises:
        ValueError: the penalty is not finite.
    """

    def __init__(self, penalty: float, base: ScoringFunction = cumulative_log_prob):
        if not math.isfinite(penalty):
            raise ValueError(f"penalty must be finite, got {penalty}")
        self.penalty = penalty
        self.base = base

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        return self.base(candidates) - self.penalty * candidates.depth


class RankPenalty:
    """Takes `penalty` nats off per rank below the best sibling, which makes trees narrower.

    Args:
        penalty: nats per rank.
        base: the score it is taken from.

    Raises:
        ValueError: the penalty is not finite, or negative, which would put a sibling before a better one.
    """

    def __init__(self, penalty: float, base: ScoringFunction = cumulative_log_prob):
        if not 0 <= penalty < math.inf:
            raise ValueError(f"penalty must be at least 0 and finite, got {penalty}")
        self.penalty = penalty
        self.base = base

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        return self.base(candidates) - self.penalty * candidates.ranks


class TemperatureCalibrated:
    """Cumulative log-probability under laws re-tempered by `temperature`, for drafts that are too sure (> 1) or unsure.

    Each law is the offered candidates and all other tokens as one outcome, raised to 1 / temperature and normalised.

    Args:
        temperature: above 1 flattens, below 1 sharpens; 1 gives `cumulative_log_prob`.

    Raises:
        ValueError: the temperature is not positive and finite.
    """

    def __init__(self, temperature: float):
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        self.temperature = temperature

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        law = torch.cat([candidates.log_probs, rest_log_prob(candidates.log_probs)], dim=-1)
        tempered = (law / self.temperature).log_softmax(dim=-1)[..., :-1]
        return candidates.parent_priorities + tempered


def rest_log_prob(log_probs: Tensor) -> Tensor:
    """Returns log of the probability that `log_probs` [..., K] leave over, [..., 1]; -inf where they leave none."""
    return torch.log((1.0 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp(min=0.0))


def law_entropy(log_probs: Tensor) -> Tensor:
    """Returns the entropy in nats [..., 1] of `log_probs` [..., K] with everything else as one outcome."""
    law = torch.cat([log_probs, rest_log_prob(log_probs)], dim=-1)
    return torch.special.entr(law.exp()).sum(dim=-1, keepdim=True)
