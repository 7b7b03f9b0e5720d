"""Candidate sources: which children the nodes of a tree may get.

Dimension key: B batch, D draft levels, F frontier slots, K candidates, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from jetflow.protocols import Frontier


class MarginalSource:
    """A table with one law per depth: every node of a level is offered the same children.

    Args:
        tokens: int64 [B, D, K], best first.
        log_probs: float32 [B, D, K]; -inf marks a candidate that does not exist.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> source = MarginalSource.from_logits(torch.zeros(1, 3, 10), width=4)
        >>> source.max_depth
        3
    """

    def __init__(self, tokens: Tensor, log_probs: Tensor):
        if tokens.dim() != 3 or tokens.shape != log_probs.shape:
            raise ValueError(
                f"tokens and log_probs must share one shape [B, D, K], got {list(tokens.shape)} and {list(log_probs.shape)}"
            )
        self.tokens = tokens
        self.log_probs = log_probs
        self.max_depth = tokens.shape[1]

    @classmethod
    def from_logits(cls, logits: Tensor, width: int, *, temperature: float = 1.0) -> MarginalSource:
        """Takes the `width` likeliest tokens of each depth, with log-probabilities over the whole vocabulary.

        Args:
            logits: float [B, D, V], level 1 first.
            width: candidates per depth; capped at V.
            temperature: divides the logits.

        Raises:
            ValueError: wrong shape or dtype, `width` below 1, a temperature that is not positive, or, on the CPU,
                logits without a law (NaN, +inf, or all -inf). On a GPU, where looking would stall it, such logits show
                as NaN scores in the tree.
        """
        if logits.dim() != 3 or not logits.dtype.is_floating_point:
            raise ValueError(f"logits must be floats of shape [B, D, V], got {logits.dtype} {list(logits.shape)}")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        logits = logits.float() if temperature == 1.0 else logits.float() / temperature
        total = logits.logsumexp(dim=-1, keepdim=True)
        if total.device.type == "cpu" and not bool(total.isfinite().all()):
            raise ValueError("logits must have a law at every depth, got NaN, +inf or nothing but -inf")
        values, tokens = logits.topk(min(width, logits.shape[-1]), dim=-1)
        return cls(tokens, values - total)

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, 1, K] of the children at depth `level`."""
        return self.tokens[:, level - 1, None], self.log_probs[:, level - 1, None]


class PairwiseSource:
    """A table conditioned on the parent: one law per depth and candidate of the depth before.

    Args:
        tokens: int64 [B, D, K], candidates of each depth.
        first_log_probs: float32 [B, K], law of depth 1.
        log_probs: float32 [B, D - 1, K, K]; entry (d, i, j) is the log-probability of candidate j of depth d + 2 after
            candidate i of depth d + 1.

    Raises:
        ValueError: the shapes do not fit together.
    """

    def __init__(self, tokens: Tensor, first_log_probs: Tensor, log_probs: Tensor):
        batch, depth, width = tokens.shape
        if first_log_probs.shape != (batch, width) or log_probs.shape != (batch, depth - 1, width, width):
            raise ValueError(
                f"tokens {list(tokens.shape)} need first_log_probs {[batch, width]} and log_probs "
                f"{[batch, depth - 1, width, width]}, got {list(first_log_probs.shape)} and {list(log_probs.shape)}"
            )
        self.max_depth = depth
        self._tokens = tokens
        self._first = first_log_probs
        self._log_probs = log_probs

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K], best first for each parent."""
        if level == 1:
            tokens, log_probs = self._tokens[:, :1], self._first[:, None]
        else:
            # A parent's candidate index is found by its token, which is unique within its depth.
            index = (self._tokens[:, level - 2, None] == frontier.tokens[:, :, None]).int().argmax(dim=-1)
            width = self._tokens.shape[2]
            rows = index[:, :, None].expand(-1, -1, width)
            log_probs = self._log_probs[:, level - 2].gather(1, rows)
            tokens = self._tokens[:, level - 1, None].expand_as(log_probs)
        log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
        return tokens.gather(-1, order), log_probs
