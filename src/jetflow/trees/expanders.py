"""Tree expanders: from a candidate source to a token tree of at most `budget` nodes.

Equal priorities break ties the same way everywhere: lower depth, lower parent, lower rank.

Dimension key: B batch, D source levels, K candidates per parent, M ledger entries, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jetflow.kernels import dispatch
from jetflow.kernels.expand import expand_tree, fits
from jetflow.protocols import Candidates, CandidateSource, Frontier, ScoringFunction
from jetflow.scoring.functions import cumulative_log_prob
from jetflow.trees.growth import ask, compact, grow, grow_best
from jetflow.trees.heap import MOST_NODES, best_from_heap
from jetflow.trees.ranking import best_indices
from jetflow.trees.sources import KnownLaws, known_laws
from jetflow.trees.token_tree import TokenTree


class BestFirst:
    """The exact best tree: the `budget` nodes of highest priority among all that the source offers.

    With the default score this is the tree that maximises the expected acceptance length under the draft's own law
    (DDTree, arXiv 2604.12989, Propositions 1 and 2). A node at depth d has d ancestors in the tree, so at most
    `budget - d` nodes of a level can be in it; keeping that many per level is exact. Nodes stand best first, so
    `tree.first(n)` is the best tree of n nodes.

    Args:
        scoring: priority of a candidate; cumulative log-probability when absent.

    Example:
        >>> from jetflow import MarginalSource
        >>> source = MarginalSource.from_logits(torch.tensor([[[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]]]), width=3)
        >>> BestFirst()(torch.tensor([5]), source, 4).tokens.tolist()
        [[5, 0, 0, 1]]
    """

    def __init__(self, scoring: ScoringFunction = cumulative_log_prob):
        self.scoring = scoring

    @property
    def token_blind(self) -> bool:
        """Whether the score looks at laws and ranks alone."""
        return getattr(self.scoring, "token_blind", False)

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree:
        """Builds trees of at most `budget` nodes.

        Args:
            root_tokens: int64 [B].
            source: says which children nodes may get.
            budget: most nodes, root included.

        Returns:
            Trees [B, N] with N <= budget; rows with fewer reachable nodes are padded.

        Raises:
            ValueError: `budget` is below 1 or `root_tokens` is not int64 [B].
        """
        levels = _checked_levels(root_tokens, source, budget)
        if levels < 1:
            return TokenTree.root_only(root_tokens)
        if self.scoring is cumulative_log_prob:
            laws = known_laws(source, levels)
            tree = None if laws is None else _from_laws(root_tokens, laws, budget)
            if tree is not None:
                return tree
        return grow_best(root_tokens, source, self.scoring, levels=levels, budget=budget)


class FanoutBestFirst:
    """The published rule (JetSpec, arXiv 2606.18394, Algorithm 1): pop the best open node, add up to W children.

    A child never ranks above its parent, so the nodes popped are just the best ones in order: they are found like those
    of `BestFirst`, and their children are appended until the budget is used. Nodes stand in the order in which the
    algorithm adds them. It spends nodes on low ranks and is never better than `BestFirst`; it is here so that published
    numbers can be repeated.

    Args:
        width: children W that a popped node gets.
        scoring: priority of a node; cumulative log-probability when absent.

    Raises:
        ValueError: `width` is below 1.

    Example:
        >>> from jetflow import MarginalSource
        >>> source = MarginalSource.from_logits(torch.tensor([[[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]]]), width=3)
        >>> FanoutBestFirst(2)(torch.tensor([5]), source, 4).tokens.tolist()
        [[5, 0, 1, 0]]
    """

    def __init__(self, width: int, scoring: ScoringFunction = cumulative_log_prob):
        self.width = _checked_width(width)
        self.scoring = scoring

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree:
        """Builds trees of at most `budget` nodes; see `BestFirst`."""
        levels = _checked_levels(root_tokens, source, budget)
        if levels < 1:
            return TokenTree.root_only(root_tokens)
        ledger = grow(
            root_tokens,
            source,
            self.scoring,
            levels=levels,
            frontier_size=lambda level: budget - level,
            width=self.width,
        )
        # All but the last level, whose entries have no children.
        offered = sum(ledger.level_sizes[:-1])
        count = min(budget, offered) - 1
        popped = best_indices(ledger.priorities[:, 1:offered], count) + 1
        popped = torch.cat([popped.new_zeros(len(popped), 1), popped], dim=1)
        # Entry 0 is the root; entry 1 + i * W + r is child r of the i-th popped node.
        tokens, scores = ledger.children(popped)
        width = tokens.shape[2]
        turn = torch.zeros_like(ledger.parents).scatter(
            1, popped, torch.arange(count + 1, device=popped.device).expand_as(popped)
        )
        entry = 1 + turn.gather(1, ledger.parents) * width + ledger.ranks
        entry[:, 0] = 0
        parents = entry.gather(1, popped)[:, :, None].expand(-1, -1, width).flatten(1)
        depths = ledger.depths[popped][:, :, None].expand(-1, -1, width).flatten(1) + 1
        zeros = popped.new_zeros(len(popped), 1)
        return compact(
            torch.cat([root_tokens[:, None], tokens.flatten(1)], dim=1),
            torch.cat([zeros, parents], dim=1),
            torch.cat([zeros, depths], dim=1),
            torch.cat([zeros.float(), scores.flatten(1)], dim=1),
            budget,
        )


class Beam:
    """Keeps the `width` best nodes of each level, level by level, until the budget is used.

    Args:
        width: nodes per level.
        scoring: priority of a candidate; cumulative log-probability when absent.

    Raises:
        ValueError: `width` is below 1.

    Example:
        >>> from jetflow import MarginalSource
        >>> source = MarginalSource.from_logits(torch.tensor([[[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]]]), width=3)
        >>> Beam(2)(torch.tensor([5]), source, 4).depths.tolist()
        [[0, 1, 1, 2]]
    """

    def __init__(self, width: int, scoring: ScoringFunction = cumulative_log_prob):
        self.width = _checked_width(width)
        self.scoring = scoring

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree:
        """Builds trees of at most `budget` nodes; see `BestFirst`."""
        levels = _checked_levels(root_tokens, source, budget)
        if levels < 1:
            return TokenTree.root_only(root_tokens)
        ledger = grow(root_tokens, source, self.scoring, levels=levels, frontier_size=lambda level: self.width)
        return compact(ledger.tokens, ledger.parents, ledger.depths, ledger.scores, budget)


class Chain:
    """The single path that takes the source's first child each time, which is the likeliest one unless children are drawn."""

    token_blind = True

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree:
        """Builds chains of at most `budget` nodes; see `BestFirst`."""
        return Beam(1, _by_rank)(root_tokens, source, budget)


class FixedShape:
    """A static topology: node i is the child of rank `ranks[i]` of node `parents[i]`.

    Args:
        parents: parent of each node, -1 for node 0, parents first.
        ranks: rank of each node among its parent's candidates; that of the root is not read.

    Attributes:
        depth: the deepest level of the shape; a drafter that cannot draft that deep refuses it.

    Raises:
        ValueError: the lists differ in length, a parent does not come before its child, a rank is negative, or two
            nodes are the same child.

    Example:
        >>> shape = FixedShape(parents=[-1, 0, 0, 1], ranks=[0, 0, 1, 0])
    """

    token_blind = True

    def __init__(self, parents: Sequence[int], ranks: Sequence[int]):
        if len(parents) != len(ranks) or not parents:
            raise ValueError(f"parents and ranks must have one length of at least 1, got {len(parents)}, {len(ranks)}")
        if min(ranks) < 0:
            raise ValueError(f"ranks must be at least 0, got {min(ranks)}")
        # The rules of a shape are those of a tree whose tokens are ranks.
        checked = TokenTree.from_parents([list(ranks)], [list(parents)])
        self._parents, self._ranks = list(parents), list(ranks)
        self._depths: list[int] = checked.depths[0].tolist()
        self.depth = max(self._depths)

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree:
        """Builds trees of this shape, cut to its first `budget` nodes.

        Nodes whose token does not exist or stands at a lower rank under the same parent are left out with all below
        them, as are levels that the source does not fill (as near a length limit).

        Raises:
            ValueError: as for `BestFirst`, or the shape asks for a rank that the source does not offer.
        """
        levels = _checked_levels(root_tokens, source, budget)
        size = min(budget, len(self._parents))
        deepest = min(levels, max(self._depths[:size]))
        nodes = [[node for node in range(size) if self._depths[node] == depth] for depth in range(deepest + 1)]
        slots = root_tokens.new_zeros(len(root_tokens), 1)
        tokens, scores = [root_tokens[:, None]], [slots.float()]
        for level in range(1, deepest + 1):
            child_tokens, log_probs = ask(source, level, Frontier(tokens[-1], slots, scores[-1]))
            num_parents, width = child_tokens.shape[1:]
            ranks = [self._ranks[node] for node in nodes[level]]
            if max(ranks) >= width:
                raise ValueError(f"the shape asks for rank {max(ranks)}, but the source offers {width} at level {level}")
            above = [nodes[level - 1].index(self._parents[node]) for node in nodes[level]]
            rows = above if num_parents > 1 else [0] * len(above)
            chosen = _index([row * width + rank for row, rank in zip(rows, ranks, strict=True)], root_tokens.device)
            slot = _index(above, root_tokens.device)
            tokens.append(child_tokens.flatten(1).index_select(1, chosen))
            scores.append(scores[-1].index_select(1, slot) + log_probs.flatten(1).index_select(1, chosen))
            slots = slot.expand(len(root_tokens), -1)
        # From the order of levels to that of the shape; what is too deep is left out.
        shown = [node for node in range(size) if self._depths[node] <= deepest]
        by_level = [node for level_nodes in nodes for node in level_nodes]
        order = _index([by_level.index(node) for node in shown], root_tokens.device)
        parents = _index([shown.index(max(self._parents[node], 0)) for node in shown], root_tokens.device)
        return compact(
            torch.cat(tokens, dim=1).index_select(1, order),
            parents.expand(len(root_tokens), -1),
            _index([self._depths[node] for node in shown], root_tokens.device),
            torch.cat(scores, dim=1).index_select(1, order),
            budget,
        )


def _from_laws(root_tokens: Tensor, laws: KnownLaws, budget: int) -> TokenTree | None:
    """The best trees of laws that are known, where a kernel or the host is quicker than growth."""
    if dispatch.runs_kernels(root_tokens):
        if fits(laws.log_probs, budget):
            return TokenTree(*expand_tree(root_tokens, *laws.tables(), budget))
    elif root_tokens.device.type == "cpu" and len(root_tokens) * budget <= MOST_NODES and not laws.log_probs.isnan().any():
        return best_from_heap(root_tokens, *laws, budget)
    return None


def _by_rank(candidates: Candidates) -> Tensor:
    return -candidates.ranks.float().expand_as(candidates.log_probs)


def _index(values: list[int], device: torch.device) -> Tensor:
    """Returns `values` as int64 on `device`, without waiting for it."""
    return torch.tensor(values).to(device, non_blocking=True)


def _checked_levels(root_tokens: Tensor, source: CandidateSource, budget: int) -> int:
    """Returns how many levels a tree of `budget` nodes can use."""
    if budget < 1:
        raise ValueError(f"budget must be at least 1 (the root), got {budget}")
    if root_tokens.dim() != 1 or root_tokens.dtype != torch.int64:
        raise ValueError(f"root_tokens must be int64 [B], got {root_tokens.dtype} {list(root_tokens.shape)}")
    return min(source.max_depth, budget - 1)


def _checked_width(width: int) -> int:
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    return width
