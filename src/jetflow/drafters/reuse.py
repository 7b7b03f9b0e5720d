"""ReusingDrafter: what the last tree drafted below the bonus token seeds the next one.

Dimension key: B batch, N nodes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jetflow.drafters.merged import merge_trees
from jetflow.protocols import DraftContext, Drafter
from jetflow.trees.token_tree import TokenTree


class ReusingDrafter:
    """Joins a drafter's fresh tree with what its last one held below the new root.

    The target's bonus token may stand in the tree that it was chosen over: as a node at its own depth behind other tokens. The
    subtree of the likeliest such node is moved to the new root, its scores taken relative to that node's, and mixed with the
    fresh tree: a path's probability is `(1 - weight) * fresh + weight * seed`, so scores stay honest probabilities.

    Args:
        drafter: proposes the fresh trees.
        weight: of the seed, between 0 and 1.

    Raises:
        ValueError: `weight` is not between 0 and 1.

    Example:
        >>> drafter = ReusingDrafter(ParallelDrafter(head, target), weight=0.1)  # doctest: +SKIP
    """

    def __init__(self, drafter: Drafter, weight: float = 0.1):
        if not 0 < weight < 1:
            raise ValueError(f"weight must be between 0 and 1, got {weight}")
        self.taps: tuple[int, ...] = tuple(getattr(drafter, "taps", ()))
        self._drafter, self._weight = drafter, weight
        self._last: tuple[TokenTree, list[int]] | None = None

    def reset(self, batch_size: int) -> None:
        """Forgets the last tree, and hands the call on."""
        self._last = None
        self._hand_on("reset", batch_size)

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps the last trees of these rows, and hands the call on."""
        if self._last is not None:
            tree, lengths = self._last
            self._last = (TokenTree.stack([tree.row(row) for row in rows]), [lengths[row] for row in rows])
        self._hand_on("keep_rows", rows)

    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Hands the call on."""
        self._hand_on("observe", token_ids, features, num_tokens)

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns the best `budget` nodes of fresh trees and seeds.

        Raises:
            ValueError: the drafter draws children, which cannot be mixed.
        """
        tree = self._drafter.propose(context, budget)
        lengths = [len(ids) for ids in context.token_ids]
        if self._last is not None and len(self._last[1]) == len(lengths):
            seeds = seed_trees(self._last[0], context, [now - then for now, then in zip(lengths, self._last[1], strict=True)])
            tree = merge_trees([tree, seeds], [1 - self._weight, self._weight], budget)
        self._last = (tree, lengths)
        return tree

    def _hand_on(self, name: str, *args: Any) -> None:
        if hasattr(self._drafter, name):
            getattr(self._drafter, name)(*args)


def seed_trees(last: TokenTree, context: DraftContext, num_new: list[int]) -> TokenTree:
    """Returns what the last trees drafted below the new roots; the root alone where they do not hold it.

    Args:
        last: trees of the round before.
        context: the new round's; levels below its `max_depth` are left out.
        num_new: for each row the tokens committed since, which is the depth of the new root in the last tree.
    """
    rows = []
    for row, (root, depth) in enumerate(zip(context.root_tokens.tolist(), num_new, strict=True)):
        count = int(last.num_nodes[row])
        columns = (last.tokens, last.parents, last.depths, last.scores)
        tokens, parents, depths, scores = (column[row, :count].tolist() for column in columns)
        places = {}
        same = [node for node in range(1, count) if depths[node] == depth and tokens[node] == root]
        kept: list[tuple[int, int, float]] = [(root, -1, 0.0)]
        if same:
            top = max(same, key=lambda node: scores[node])
            places[top] = 0
            for node in range(top + 1, count):
                if parents[node] in places and depths[node] - depth <= context.max_depth:
                    places[node] = len(places)
                    kept.append((tokens[node], places[parents[node]], scores[node] - scores[top]))
        rows.append(kept)
    width = max(len(row) for row in rows)
    padded = [row + [(0, -1, 0.0)] * (width - len(row)) for row in rows]
    trees = TokenTree.from_parents(
        [[token for token, _, _ in row] for row in padded],
        [[parent for _, parent, _ in row] for row in padded],
        [[score for _, _, score in row] for row in padded],
        num_nodes=[len(row) for row in rows],
    )
    return trees.to(last.tokens.device)
