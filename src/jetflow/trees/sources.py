"""Candidate sources: which children the nodes of a tree may get.

Dimension key: B batch, D draft levels, F frontier slots, K candidates, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from jetflow.kernels import dispatch
from jetflow.kernels.expand import LawTables
from jetflow.kernels.top_tokens import MAX_COUNT, top_tokens
from jetflow.protocols import CandidateSource, Frontier
from jetflow.scoring.functions import rest_log_prob
from jetflow.trees.growth import safe_log_probs
from jetflow.trees.ranking import likeliest_tokens


class KnownLaws(NamedTuple):
    """Laws that are known before the tree is.

    Attributes:
        tokens: int64 [B, D, K], candidates of each depth.
        log_probs: float32 [B, D, R, K], laws over them, in the order of the candidates; R is 1, or K: one law for each
            candidate of the depth before, of which depth 1 has equal ones.
    """

    tokens: Tensor
    log_probs: Tensor

    def tables(self) -> LawTables:
        """Returns them as the kernel reads them: each law best first, and where a parent's law stands."""
        shape = self.log_probs.shape
        tokens = self.tokens[:, :, None].expand(shape)
        log_probs, order = self.log_probs.sort(dim=-1, descending=True, stable=True)
        # Of equal tokens the likeliest counts; the others move to the end.
        log_probs, again = safe_log_probs(tokens.gather(-1, order), log_probs).sort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, again)
        if shape[2] == 1:
            return LawTables(tokens.gather(-1, order), log_probs, None)
        # As a parent's law is found by its token, the first candidate that holds it is meant.
        same = self.tokens[:, :, :, None] == self.tokens[:, :, None, :]
        columns = same.int().argmax(dim=-1)[:, :, None].expand(shape)
        return LawTables(tokens.gather(-1, order), log_probs, columns.gather(-1, order))


class MarginalSource:
    """A table with one law per depth: every node of a level is offered the same children.

    Args:
        tokens: int64 [B, D, K], best first.
        log_probs: float32 [B, D, K]; -inf marks a candidate that does not exist.

    Raises:
        ValueError: the shapes differ, or a dtype is wrong.

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
        check_dtypes(tokens, log_probs)
        self.tokens = tokens
        self.log_probs = log_probs
        self.max_depth = tokens.shape[1]

    @classmethod
    def from_logits(
        cls, logits: Tensor, width: int, *, temperature: float = 1.0, token_ids: Tensor | None = None
    ) -> MarginalSource:
        """Takes the `width` likeliest tokens of each depth, with log-probabilities over the whole vocabulary.

        Equal logits go to the lower token id.

        Args:
            logits: float [B, D, V], level 1 first.
            width: candidates per depth; capped at V.
            temperature: divides the logits.
            token_ids: int64 [V], the token that each column stands for, where the logits are over a part of the vocabulary.

        Raises:
            ValueError: wrong shape or dtype, `width` below 1, a temperature that is not positive and finite, or, on the
                CPU, logits without a law (NaN, +inf, or all -inf). On a GPU, where looking would stall it, such logits
                show as NaN scores in the tree.
        """
        if logits.dim() != 3 or not logits.dtype.is_floating_point:
            raise ValueError(f"logits must be floats of shape [B, D, V], got {logits.dtype} {list(logits.shape)}")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        if dispatch.runs_kernels(logits) and temperature == 1.0 and width <= MAX_COUNT and logits.stride(-1) == 1:
            found = top_tokens(logits.flatten(0, 1), min(width, logits.shape[-1]))
            tokens, log_probs = (one.unflatten(0, logits.shape[:2]) for one in found)
            return cls(tokens if token_ids is None else token_ids[tokens], log_probs)
        logits = logits.float() if temperature == 1.0 else logits.float() / temperature
        tokens = likeliest_tokens(logits, min(width, logits.shape[-1]))
        log_probs = logits.log_softmax(dim=-1).gather(-1, tokens)
        if log_probs.device.type == "cpu" and not bool(log_probs[..., :1].isfinite().all()):
            raise ValueError("logits must have a law at every depth, got NaN, +inf or nothing but -inf")
        return cls(tokens if token_ids is None else token_ids[tokens], log_probs)

    def laws(self, levels: int) -> KnownLaws:
        """Returns the laws of the first `levels` depths, one of each."""
        return KnownLaws(self.tokens[:, :levels], self.log_probs[:, :levels, None])

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, 1, K] of the children at depth `level`."""
        return self.tokens[:, level - 1, None], self.log_probs[:, level - 1, None]


class PairwiseSource:
    """A table conditioned on the parent: one law per depth and candidate of the depth before.

    Args:
        tokens: int64 [B, D, K], candidates of each depth, each token once per depth.
        first_log_probs: float32 [B, K], law of depth 1.
        log_probs: float32 [B, D - 1, K, K]; entry (d, i, j) is the log-probability of candidate j of depth d + 2 after
            candidate i of depth d + 1.

    Raises:
        ValueError: the shapes do not fit together, or a dtype is wrong.

    Example:
        >>> tokens = torch.tensor([[[4, 7], [1, 2]]])
        >>> first, table = torch.tensor([[0.6, 0.4]]), torch.tensor([[[[0.9, 0.1], [0.2, 0.8]]]])
        >>> PairwiseSource(tokens, first.log(), table.log()).max_depth
        2
    """

    def __init__(self, tokens: Tensor, first_log_probs: Tensor, log_probs: Tensor):
        if tokens.dim() != 3:
            raise ValueError(f"tokens must be [B, D, K], got {list(tokens.shape)}")
        batch, depth, width = tokens.shape
        if first_log_probs.shape != (batch, width) or log_probs.shape != (batch, depth - 1, width, width):
            raise ValueError(
                f"tokens {list(tokens.shape)} need first_log_probs {[batch, width]} and log_probs "
                f"{[batch, depth - 1, width, width]}, got {list(first_log_probs.shape)} and {list(log_probs.shape)}"
            )
        check_dtypes(tokens, first_log_probs, log_probs)
        self.max_depth = depth
        self._tokens, self._first, self._rest = tokens, first_log_probs, log_probs

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        width: int,
        additions: Callable[[Tensor, Tensor], Tensor],
        *,
        token_ids: Tensor | None = None,
        num_corrected: int | None = None,
    ) -> PairwiseSource:
        """Takes the `width` likeliest tokens of each depth and corrects their logits by the token before.

        A corrected law is normalised over the candidates, corrected, and all other tokens, as they are: the law that the
        correction gives if it leaves the others alone. So the children of a node have at most the probability 1.

        Args:
            logits: float [B, D, V], level 1 first; those of level 1 are taken as corrected.
            width: candidates per depth; capped at V.
            additions: what is added to the logits of the candidates, int64 [B, D - 1, K] for depths 2 to D, behind each
                parent, int64 [B, D - 1, K], the candidates of depths 1 to D - 1; float [B, D - 1, K (parent), K].
            token_ids: int64 [V], the token that each column stands for, where the logits are over a part of the vocabulary.
            num_corrected: correct the first so many candidates of a depth among themselves, so that they keep the mass that
                they have together, and leave the others as they are; None corrects all of them against the other tokens.

        Raises:
            ValueError: as for `MarginalSource.from_logits`.
        """
        plain = MarginalSource.from_logits(logits, width, token_ids=token_ids)
        tokens, log_probs = plain.tokens, plain.log_probs
        uncorrected = log_probs[:, 1:, None]
        corrected = uncorrected + additions(tokens[:, :-1], tokens[:, 1:]).float()
        if num_corrected is None:
            rest = rest_log_prob(uncorrected).expand(*corrected.shape[:-1], 1)
            return cls(tokens, log_probs[:, 0], torch.cat([corrected, rest], dim=-1).log_softmax(dim=-1)[..., :-1])
        first = corrected[..., :num_corrected].log_softmax(-1)
        first = first + uncorrected[..., :num_corrected].logsumexp(-1, keepdim=True)
        others = uncorrected[..., num_corrected:].expand(*first.shape[:-1], -1)
        return cls(tokens, log_probs[:, 0], torch.cat([first, others], dim=-1))

    def laws(self, levels: int) -> KnownLaws:
        """Returns the laws of the first `levels` depths, one for each candidate of the depth before."""
        first = self._first[:, None, None].expand(-1, -1, self._first.shape[1], -1)
        return KnownLaws(self._tokens[:, :levels], torch.cat([first, self._rest[:, : levels - 1]], dim=1))

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K], best first for each parent."""
        if level == 1:
            log_probs = self._first[:, None]
        else:
            # A parent's candidate index is found by its token.
            index = (self._tokens[:, level - 2, None] == frontier.tokens[:, :, None]).int().argmax(dim=-1)
            log_probs = self._rest[:, level - 2].gather(1, index[:, :, None].expand(-1, -1, self._tokens.shape[2]))
        # Only what is asked for is sorted.
        log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
        return self._tokens[:, level - 1, None].expand_as(order).gather(-1, order), log_probs


class RecurrentSource:
    """Laws conditioned on the whole path, computed level by level for the frontier alone.

    Args:
        tokens: int64 [B, D, K], candidates of each depth.
        log_probs: float32 [B, D, K], their uncorrected laws, level 1 first.
        step: given a level, the frontier's tokens int64 [B, F] in front of it and the memories of their parents [B, F, R]
            (None at the root), returns what is added to the log-probabilities of that level's candidates, float [B, F, K],
            and the memories of the frontier [B, F, R].
    """

    def __init__(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        step: Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    ):
        self.max_depth = tokens.shape[1]
        self._tokens, self._log_probs = tokens, log_probs
        self._rest = rest_log_prob(log_probs)
        self._step = step
        self._memory: Tensor | None = None

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K], best first for each parent."""
        before = None
        if level > 1 and self._memory is not None:
            before = self._memory.gather(1, frontier.parents[:, :, None].expand(-1, -1, self._memory.shape[2]))
        added, self._memory = self._step(level, frontier.tokens, before)
        corrected = self._log_probs[:, level - 1, None] + added.float()
        rest = self._rest[:, level - 1, None]
        law = corrected - torch.logaddexp(corrected.logsumexp(-1, keepdim=True), rest)
        law, order = law.sort(dim=-1, descending=True, stable=True)
        return self._tokens[:, level - 1, None].expand_as(order).gather(-1, order), law


def known_laws(source: CandidateSource, levels: int) -> KnownLaws | None:
    """Returns the laws of a source that are known before the tree is; None for other sources."""
    # Not for classes derived from them, whose answers may be others.
    if type(source) is MarginalSource or type(source) is PairwiseSource:
        return source.laws(levels)
    return None


def check_dtypes(tokens: Tensor, *log_probs: Tensor) -> None:
    """Raises ValueError unless tokens are int64 and log-probabilities float32."""
    if tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64, got {tokens.dtype}")
    for values in log_probs:
        if values.dtype != torch.float32:
            raise ValueError(f"log_probs must be float32, got {values.dtype}")
