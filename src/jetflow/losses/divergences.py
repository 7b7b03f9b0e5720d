"""Cross-entropy and the divergences between the draft's and the target's law at each position.

Every loss computes in float32 (float64 logits stay float64), treats the target's logits as constants, and gives 0 with
a zero gradient where `labels` is -100, whatever the logits are there.

Dimension key: V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
# Smallest log-probability that reverse KL tells apart; float32 holds nothing below exp(-103).
LOG_PROB_FLOOR = -100.0
# About the smallest normal float32.
PROB_FLOOR = 1e-37


class CrossEntropy:
    """Negative log-probability of the label under the draft. The target's logits are not used and may be None.

    Example:
        >>> CrossEntropy()(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([2]))
        tensor([1.3863])
    """

    uses_target = False

    def __call__(self, draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        """Compares the draft with the labels.

        Args:
            draft_logits: float [..., V].
            target_logits: float [..., V] or None, not used.
            labels: int64 [...], next tokens; -100 where ignored.

        Returns:
            float32 [...].

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        _check_inputs(draft_logits, target_logits, labels)
        ignored = labels == IGNORED_LABEL
        log_probs = F.log_softmax(_prepare(draft_logits, ignored), dim=-1)
        picked = log_probs.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
        return (-picked).masked_fill(ignored, 0.0)


class ForwardKL:
    """KL(target || draft) per position: `T^2 * sum_v p(v) (log p(v) - log q(v))`, the JetSpec loss.

    p and q are the softmax of target and draft logits divided by the temperature T. The factor T^2 keeps the size of
    the gradient when T changes. Tokens of target probability 0 (logit -inf) add nothing.

    Args:
        temperature: T, above 0.

    Raises:
        ValueError: `temperature` is not a finite number above 0.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, -torch.inf]])
        >>> ForwardKL()(logits, logits, torch.tensor([1])).item()
        0.0
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = checked_temperature(temperature)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Compares the two laws.

        Args:
            draft_logits: float [..., V].
            target_logits: float [..., V]; -inf marks tokens that the target never takes.
            labels: int64 [...], only compared with -100, which marks ignored positions.

        Returns:
            float32 [...]; inf where the draft's logit is -inf for a token that the target may take.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        draft_log_probs, target_log_probs = both_log_probs(draft_logits, target_logits, labels, self.temperature)
        probs = target_log_probs.exp()
        # `where` and not a product: 0 * (-inf) would be NaN.
        terms = torch.where(probs > 0, probs * (target_log_probs - draft_log_probs), 0.0)
        return self.temperature**2 * terms.sum(-1)


class ReverseKL:
    """KL(draft || target) per position: `T^2 * sum_v q(v) (log q(v) - log p(v))`.

    p and q are the softmax of target and draft logits divided by the temperature T. Both log-probabilities are floored
    at -100, about the smallest that float32 can hold as a probability: a token that the target never takes (logit -inf)
    costs the draft 100 nats per unit of probability instead of infinitely many, and gradients stay finite where the
    draft's own probabilities underflow.

    Args:
        temperature: T, above 0.

    Raises:
        ValueError: `temperature` is not a finite number above 0.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, -torch.inf]])
        >>> ReverseKL()(logits, logits, torch.tensor([1])).item()
        0.0
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = checked_temperature(temperature)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Compares the two laws.

        Args:
            draft_logits: float [..., V].
            target_logits: float [..., V]; -inf marks tokens that the target never takes.
            labels: int64 [...], only compared with -100, which marks ignored positions.

        Returns:
            float32 [...].

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        draft_log_probs, target_log_probs = both_log_probs(draft_logits, target_logits, labels, self.temperature)
        gaps = draft_log_probs.clamp(min=LOG_PROB_FLOOR) - target_log_probs.clamp(min=LOG_PROB_FLOOR)
        return self.temperature**2 * (draft_log_probs.exp() * gaps).sum(-1)


class JensenShannon:
    """Jensen-Shannon divergence per position: `T^2 * (KL(p || m) + KL(q || m)) / 2` with `m = (p + q) / 2`.

    Symmetric and bounded by `T^2 * log 2`, and finite whatever the logits, -inf included.

    Args:
        temperature: T, above 0.

    Raises:
        ValueError: `temperature` is not a finite number above 0.

    Example:
        >>> JensenShannon()(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]), torch.tensor([1]))
        tensor([0.6931])
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = checked_temperature(temperature)

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Compares the two laws; arguments, result and errors as for `ForwardKL`."""
        draft_log_probs, target_log_probs = both_log_probs(draft_logits, target_logits, labels, self.temperature)
        # Floored, so that the gradient of x log x stays finite where a probability underflows.
        draft, target = (one.exp().clamp(min=PROB_FLOOR) for one in (draft_log_probs, target_log_probs))
        mixture = (0.5 * (draft + target)).log()
        terms = draft * (draft.log() - mixture) + target * (target.log() - mixture)
        return self.temperature**2 * 0.5 * terms.sum(-1)


def checked_temperature(temperature: float) -> float:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number above 0, got {temperature}")
    return float(temperature)


def _check_inputs(draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> None:
    if target_logits is not None and draft_logits.shape != target_logits.shape:
        raise ValueError(
            f"target_logits must have the shape of draft_logits, {tuple(draft_logits.shape)}, got {tuple(target_logits.shape)}"
        )
    if labels.shape != draft_logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of draft_logits without V, {tuple(draft_logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    for name, logits in (("draft_logits", draft_logits), ("target_logits", target_logits)):
        if logits is not None and not logits.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {logits.dtype}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")


def _prepare(logits: Tensor, ignored: Tensor) -> Tensor:
    """Raises the precision and blanks ignored positions, whose gradient is then 0 even if they held NaN."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.masked_fill(ignored.unsqueeze(-1), 0.0)


def both_log_probs(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    target_temperature: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Checks the inputs and returns the log-probabilities of draft and target; equal ones at ignored positions.

    The target's temperature is that of the draft unless told otherwise.
    """
    _check_inputs(draft_logits, target_logits, labels)
    ignored = labels == IGNORED_LABEL
    draft_log_probs = F.log_softmax(_prepare(draft_logits, ignored) / temperature, dim=-1)
    other = temperature if target_temperature is None else target_temperature
    target_log_probs = F.log_softmax(_prepare(target_logits.detach(), ignored) / other, dim=-1)
    return draft_log_probs, target_log_probs
