"""Level-by-level growth, which all expanders share. Batched, on the device, without reading anything back.

At each level every kept node is offered children; the best of them are kept and become the next frontier. All that was
kept stands in a ledger: the root first, then level by level, each level best first.

Dimension key: B batch, F frontier slots, K candidates per parent, M ledger entries, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetflow.protocols import Candidates, CandidateSource, Frontier, ScoringFunction
from jetflow.scoring.functions import cumulative_log_prob
from jetflow.trees.token_tree import PADDING_PARENT, TokenTree

NEVER = float("-inf")
# Up to this many candidates per row a stable sort is quicker than topk over integer keys.
SORTED_UP_TO = 1024


@dataclass(frozen=True)
class Ledger:
    """Everything that growth kept. Entry 0 is the root; parents are ledger indices and smaller than their children's.

    Attributes:
        tokens: int64 [B, M].
        parents: int64 [B, M]; 0 for the root, too.
        ranks: int64 [B, M], rank among the parent's candidates.
        depths: int64 [M].
        scores: float32 [B, M], cumulative log-probability; -inf where there is no node.
        priorities: float32 [B, M], never above the parent's; 0 for the root.
        child_tokens: int64 [B, M', K], the candidates that were offered to the first M' entries.
        child_scores: float32 [B, M', K], their cumulative log-probabilities.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    scores: Tensor
    priorities: Tensor
    child_tokens: Tensor
    child_scores: Tensor


def grow(
    root_tokens: Tensor,
    source: CandidateSource,
    scoring: ScoringFunction,
    *,
    levels: int,
    frontier_size: Callable[[int], int],
    width: int | None = None,
) -> Ledger:
    """Grows `levels` levels and keeps the best `frontier_size(level)` candidates of each.

    `width` cuts the candidates of each parent. With `levels` = L the frontier of level L is not offered children.
    """
    batch, device = len(root_tokens), root_tokens.device
    zeros = root_tokens.new_zeros(batch, 1)
    frontier = Frontier(root_tokens[:, None], zeros, zeros.float())
    priorities = zeros.float()
    tokens, parents, ranks, scores = [frontier.tokens], [zeros], [zeros], [frontier.cum_log_probs]
    all_priorities, depths, offered = [priorities], [0], []
    start = 0
    for level in range(1, levels + 1):
        child_tokens, log_probs = source(level, frontier)
        log_probs = _without_duplicates(child_tokens, log_probs)[..., :width]
        child_tokens = child_tokens[..., :width]
        num_parents, num_children = frontier.tokens.shape[1], child_tokens.shape[2]
        child_scores = frontier.cum_log_probs[:, :, None] + log_probs
        offered.append((child_tokens.expand_as(child_scores), child_scores))
        child_priorities = _priorities(scoring, level, log_probs, child_scores, priorities)
        keep = min(frontier_size(level), num_parents * num_children)
        best = best_indices(child_priorities.flatten(1), keep)
        slots, rank = best // num_children, best % num_children
        frontier = Frontier(
            _pick(child_tokens, slots, rank),
            slots,
            child_scores.flatten(1).gather(1, best),
        )
        priorities = child_priorities.flatten(1).gather(1, best)
        tokens.append(frontier.tokens)
        parents.append(slots + start)
        ranks.append(rank)
        scores.append(frontier.cum_log_probs)
        all_priorities.append(priorities)
        depths += [level] * keep
        start += num_parents
    return Ledger(
        tokens=torch.cat(tokens, dim=1),
        parents=torch.cat(parents, dim=1),
        ranks=torch.cat(ranks, dim=1),
        depths=torch.tensor(depths, device=device),
        scores=torch.cat(scores, dim=1),
        priorities=torch.cat(all_priorities, dim=1),
        child_tokens=torch.cat([pair[0] for pair in offered], dim=1),
        child_scores=torch.cat([pair[1] for pair in offered], dim=1),
    )


def best_indices(priorities: Tensor, count: int) -> Tensor:
    """Returns int64 [B, count], indices of the largest of `priorities` float32 [B, M]; ties go to the lowest index.

    `topk` alone leaves ties open. For many candidates the bits of the float, made to sort like the value, and the index
    form one integer key, so that no two keys are equal.
    """
    if priorities.shape[1] <= SORTED_UP_TO:
        return priorities.sort(dim=1, descending=True, stable=True).indices[:, :count]
    # Adding zero turns -0.0 into 0.0, which have different bits.
    bits = (priorities + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    index = torch.arange(priorities.shape[1], device=priorities.device)
    return ((ordered << 32) - index).topk(count, dim=1).indices


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


def _priorities(
    scoring: ScoringFunction, level: int, log_probs: Tensor, child_scores: Tensor, parent_priorities: Tensor
) -> Tensor:
    """Scores candidates [B, F, K]; a child never ranks above its parent, and what does not exist never ranks."""
    if scoring is cumulative_log_prob:
        # It has both properties by itself.
        return child_scores
    parents = parent_priorities[:, :, None]
    ranks = torch.arange(child_scores.shape[2], device=child_scores.device)
    candidates = Candidates(log_probs.expand_as(child_scores), child_scores, level, ranks, parents)
    priorities = scoring(candidates).float()
    if level > 1:
        priorities = torch.minimum(priorities, parents)
    return priorities.masked_fill(child_scores == NEVER, NEVER)


def _without_duplicates(tokens: Tensor, log_probs: Tensor) -> Tensor:
    """Returns log-probabilities with -inf where the same token stands at a better rank under the same parent."""
    index = torch.arange(tokens.shape[-1], device=tokens.device)
    same = (tokens[..., :, None] == tokens[..., None, :]) & (index < index[:, None])
    return log_probs.masked_fill(same.any(dim=-1), NEVER)


def _pick(child_tokens: Tensor, slots: Tensor, ranks: Tensor) -> Tensor:
    if child_tokens.shape[1] == 1:
        return child_tokens[:, 0].gather(1, ranks)
    return child_tokens.flatten(1).gather(1, slots * child_tokens.shape[2] + ranks)
