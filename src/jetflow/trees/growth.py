"""Level-by-level growth, which all expanders share. Batched, on the device, without reading anything back.

At each level every kept node is offered children; the best of them are kept and become the next frontier. All that was
kept stands in a ledger: the root first, then level by level, each level best first.

Dimension key: B batch, F frontier slots, K candidates per parent, M ledger entries, N tree nodes, L levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetflow.protocols import Candidates, CandidateSource, Frontier, ScoringFunction
from jetflow.scoring.functions import cumulative_log_prob
from jetflow.trees.ranking import best_indices
from jetflow.trees.token_tree import PADDING_PARENT, TokenTree

NEVER = float("-inf")


@dataclass(frozen=True)
class Ledger:
    """Everything that growth kept. Entry 0 is the root; parents are ledger indices and smaller than their children's.

    Attributes:
        tokens: int64 [B, M].
        parents: int64 [B, M]; 0 for the root, too.
        ranks: int64 [B, M], place among the parent's children of `laws`.
        depths: int64 [M].
        scores: float32 [B, M], cumulative log-probability; -inf where there is no node.
        priorities: float32 [B, M], never above the parent's; 0 for the root.
        level_sizes: number of entries of each depth.
        laws: for each depth that was offered children their tokens and log-probabilities, [B, F, K], or [B, 1, K] where
            all its entries were offered the same.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    scores: Tensor
    priorities: Tensor
    level_sizes: tuple[int, ...]
    laws: tuple[tuple[Tensor, Tensor], ...]

    def children(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens and cumulative log-probabilities [B, P, K] of what `entries`, int64 [B, P], were offered."""
        width = max(tokens.shape[2] for tokens, _ in self.laws)
        rows, start = [], 0
        for size, (tokens, _) in zip(self.level_sizes, self.laws, strict=False):
            row = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            rows.append(row.expand(size))
            start += tokens.shape[1]
        law = torch.cat(rows)[entries][:, :, None].expand(-1, -1, width)
        all_tokens = torch.cat([pad(tokens, (0, width - tokens.shape[2])) for tokens, _ in self.laws], dim=1)
        all_log_probs = torch.cat([pad(lp, (0, width - lp.shape[2]), value=NEVER) for _, lp in self.laws], dim=1)
        scores = self.scores.gather(1, entries)[:, :, None] + all_log_probs.gather(1, law)
        return all_tokens.gather(1, law), scores


class _Kept(NamedTuple):
    """What growth kept of one level: tokens, slots of the parents, ranks, scores and priorities, each [B, F]."""

    tokens: Tensor
    slots: Tensor
    ranks: Tensor
    scores: Tensor
    priorities: Tensor


def grow(
    root_tokens: Tensor,
    source: CandidateSource,
    scoring: ScoringFunction,
    *,
    levels: int,
    frontier_size: Callable[[int], int],
    width: int | None = None,
) -> Ledger:
    """Grows `levels` >= 1 levels and keeps the best `frontier_size(level)` candidates of each.

    `width` cuts the candidates of each parent. The last level is not offered children.

    Raises:
        ValueError: the source or the scoring function answers with a wrong shape, or on the CPU, with a NaN priority.
    """
    zeros = root_tokens.new_zeros(len(root_tokens), 1)
    kept = [_Kept(root_tokens[:, None], zeros, zeros, zeros.float(), zeros.float())]
    parents, laws, start = [zeros], [], 0
    sizes = [frontier_size(level) for level in range(1, levels + 1)]
    stairs: _Staircase | None = None
    for level, size in enumerate(sizes, 1):
        last = kept[-1]
        num_parents = last.tokens.shape[1]
        tokens, log_probs = ask(source, level, Frontier(last.tokens, last.slots, last.scores), width)
        if scoring is cumulative_log_prob and tokens.shape[1] == 1:
            # Masked duplicates move to the end, as the staircase needs sorted children.
            log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
            tokens = tokens.gather(-1, order)
            if stairs is None or stairs.width != tokens.shape[2]:
                stairs = _Staircase(max(sizes), tokens.shape[2], root_tokens.device)
            kept.append(_best_of_one_law(last, tokens[:, 0], log_probs[:, 0], stairs, size))
        else:
            kept.append(_best_of_all(last, tokens, log_probs, scoring, level, size))
        laws.append((tokens, log_probs))
        parents.append(kept[-1].slots + start)
        start += num_parents
    level_sizes = tuple(entries.tokens.shape[1] for entries in kept)
    depths = [root_tokens.new_full((size,), depth) for depth, size in enumerate(level_sizes)]
    columns = _Kept(*(torch.cat(column, dim=1) for column in zip(*kept, strict=True)))
    return Ledger(
        tokens=columns.tokens,
        parents=torch.cat(parents, dim=1),
        ranks=columns.ranks,
        depths=torch.cat(depths),
        scores=columns.scores,
        priorities=columns.priorities,
        level_sizes=level_sizes,
        laws=tuple(laws),
    )


def ask(source: CandidateSource, level: int, frontier: Frontier, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns the source's best `width` tokens and log-probabilities [B, F, K] or [B, 1, K], safe to build on.

    Of equal tokens under one parent only the first keeps its log-probability; the others get -inf. No log-probability
    is above 0, as rounding may make that of a certain token.

    Raises:
        ValueError: the answer does not have the shape or the device that the frontier asks for.
    """
    tokens, log_probs = source(level, frontier)
    batch, slots = frontier.tokens.shape
    if tokens.shape != log_probs.shape or tokens.dim() != 3 or tokens.shape[0] != batch or tokens.shape[1] not in (1, slots):
        raise ValueError(
            f"a source must answer {batch} rows of {slots} parents with tokens and log_probs of one shape [B, F, K] or "
            f"[B, 1, K], got {list(tokens.shape)} and {list(log_probs.shape)} at level {level}"
        )
    if not tokens.device == log_probs.device == frontier.tokens.device:
        raise ValueError(
            f"root_tokens on {frontier.tokens.device} need a source on the same device, got tokens on {tokens.device} and "
            f"log_probs on {log_probs.device}"
        )
    return tokens[..., :width], safe_log_probs(tokens[..., :width], log_probs[..., :width])


def safe_log_probs(tokens: Tensor, log_probs: Tensor) -> Tensor:
    """Returns log-probabilities [..., K] at most 0, float32; of equal tokens only the first keeps its own, others get -inf."""
    ordered, order = tokens.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(tokens, dtype=torch.bool)
    repeated.scatter_(-1, order[..., 1:], ordered[..., 1:] == ordered[..., :-1])
    return log_probs.float().clamp(max=0.0).masked_fill(repeated, NEVER)


def grow_best(root_tokens: Tensor, source: CandidateSource, scoring: ScoringFunction, *, levels: int, budget: int) -> TokenTree:
    """Returns the best tree of `budget` nodes: a node at depth d has d ancestors in it, so `budget - d` of a level can be."""
    ledger = grow(root_tokens, source, scoring, levels=levels, frontier_size=lambda level: budget - level)
    return best_nodes(ledger, budget)


def best_nodes(ledger: Ledger, budget: int) -> TokenTree:
    """Returns the `budget` entries of highest priority, which are a tree, best first."""
    count = min(budget, ledger.tokens.shape[1]) - 1
    best = best_indices(ledger.priorities[:, 1:], count) + 1
    best = torch.cat([best.new_zeros(len(best), 1), best], dim=1)
    # Where each ledger entry stands in the tree; entries outside it are never looked up.
    place = torch.zeros_like(ledger.parents).scatter(1, best, torch.arange(count + 1, device=best.device).expand_as(best))
    exists = ledger.priorities.gather(1, best) != NEVER
    parents = place.gather(1, ledger.parents.gather(1, best))
    parents = torch.where(exists, parents, PADDING_PARENT)
    parents[:, 0] = PADDING_PARENT
    return TokenTree(
        tokens=torch.where(exists, ledger.tokens.gather(1, best), 0),
        parents=parents,
        depths=torch.where(exists, ledger.depths[best], 0),
        scores=torch.where(exists, ledger.scores.gather(1, best), NEVER),
        num_nodes=exists.sum(dim=1),
    )


def compact(tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: int) -> TokenTree:
    """Drops entries that hold no node (score -inf), keeps the order, and cuts to `budget` nodes.

    Args:
        tokens: int64 [B, M], entry 0 the root.
        parents: int64 [B, M], indices into the entries; anything for the root.
        depths: int64 [M] or [B, M].
        scores: float32 [B, M].
        budget: most nodes.
    """
    exists = scores != NEVER
    position = exists.long().cumsum(dim=1) - 1
    width = min(budget, tokens.shape[1])
    kept = exists & (position < width)
    # Dropped entries all land in one spare column, which is cut off.
    place = torch.where(kept, position, width)
    moved_parents = position.gather(1, parents)
    moved_parents[:, 0] = PADDING_PARENT

    def move(values: Tensor, padding: float) -> Tensor:
        out = values.new_full((len(values), width + 1), padding)
        return out.scatter(1, place, values)[:, :width]

    return TokenTree(
        tokens=move(tokens, 0),
        parents=move(moved_parents, PADDING_PARENT),
        depths=move(depths.expand_as(tokens), 0),
        scores=move(scores, NEVER),
        num_nodes=kept.sum(dim=1),
    )


class _Staircase:
    """Which (slot, rank) can be among the best `keep` when all parents have the same `width` children.

    With parents and children sorted, every (s, r) with s <= slot and r <= rank is as good or better, and those are
    (slot + 1) * (rank + 1). So only pairs for which that is at most `keep` count: a staircase of about
    keep * log(keep) steps instead of keep * width. Slots come in order, so that fewer parents mean a prefix.
    """

    def __init__(self, keep: int, width: int, device: torch.device):
        self.width = width
        self._totals = [0, *accumulate(min(width, keep // (slot + 1)) for slot in range(keep))]
        parents = torch.arange(keep, device=device)
        steps = (keep // (parents + 1)).clamp(max=width)
        # The size is known here, so that nothing need be read back.
        self._slots = parents.repeat_interleave(steps, output_size=self._totals[-1])
        first = steps.cumsum(0) - steps
        self._ranks = torch.arange(self._totals[-1], device=device) - first[self._slots]

    def below(self, num_parents: int) -> tuple[Tensor, Tensor]:
        """Returns slots and ranks, int64 [M], for the first `num_parents` parents."""
        total = self._totals[num_parents]
        return self._slots[:total], self._ranks[:total]


def _best_of_one_law(parents: _Kept, tokens: Tensor, log_probs: Tensor, stairs: _Staircase, size: int) -> _Kept:
    """Keeps the `size` best children by cumulative log-probability; all parents share `tokens` [B, K], best first."""
    slots, ranks = stairs.below(parents.tokens.shape[1])
    scores = parents.scores.index_select(1, slots) + log_probs.index_select(1, ranks)
    best = best_indices(scores, min(size, scores.shape[1]))
    scores, ranks = scores.gather(1, best), ranks[best]
    return _Kept(tokens.gather(1, ranks), slots[best], ranks, scores, scores)


def _best_of_all(parents: _Kept, tokens: Tensor, log_probs: Tensor, scoring: ScoringFunction, level: int, size: int) -> _Kept:
    """Keeps the `size` children of highest priority out of all on offer, [B, F, K] or [B, 1, K]."""
    scores = parents.scores[:, :, None] + log_probs
    priorities = scores
    if scoring is not cumulative_log_prob:
        priorities = _priorities(scoring, level, log_probs, scores, parents.priorities[:, :, None])
    width = scores.shape[2]
    scores, priorities = scores.flatten(1), priorities.flatten(1)
    best = best_indices(priorities, min(size, scores.shape[1]))
    slots, ranks = best // width, best % width
    tokens = tokens[:, 0].gather(1, ranks) if tokens.shape[1] == 1 else tokens.flatten(1).gather(1, best)
    return _Kept(tokens, slots, ranks, scores.gather(1, best), priorities.gather(1, best))


def _priorities(scoring: ScoringFunction, level: int, log_probs: Tensor, scores: Tensor, parent_priorities: Tensor) -> Tensor:
    """Scores candidates [B, F, K]; a child never ranks above its parent, and what does not exist never ranks."""
    ranks = torch.arange(scores.shape[2], device=scores.device)
    candidates = Candidates(log_probs.expand_as(scores), scores, level, ranks, parent_priorities)
    priorities = scoring(candidates).float()
    if priorities.shape != scores.shape:
        raise ValueError(f"scoring must return priorities [B, F, K] = {list(scores.shape)}, got {list(priorities.shape)}")
    # The root always comes first, so its children may rank above its 0.
    if level > 1:
        priorities = torch.minimum(priorities, parent_priorities)
    priorities = priorities.masked_fill(scores == NEVER, NEVER)
    if priorities.device.type == "cpu" and bool((priorities.isnan() & ~scores.isnan()).any()):
        raise ValueError(f"scoring must not return NaN for candidates that exist, it did at level {level}")
    return priorities
