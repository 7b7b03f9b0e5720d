"""MergedDrafter: the trees of several drafters as one, such as retrieval beside a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jetflow.protocols import DraftContext, Drafter
from jetflow.trees.token_tree import TokenTree


class MergedDrafter:
    """Joins trees under one root: equal paths become one, and the best nodes by the mixture of the drafters' laws are kept.

    A node's probability is the weighted sum of what the drafters give its path, so scores stay honest probabilities.
    Drafters that propose nothing in a round leave their weight to the others.

    Args:
        drafters: at least two; at most one may read features of the target.
        weights: weight of each drafter, above 0; all alike when absent. They are scaled to a sum of 1.

    Raises:
        ValueError: fewer than two drafters, weights that do not fit, or several drafters that read features.

    Example:
        >>> drafter = MergedDrafter([ParallelDrafter(head, target), PromptLookupDrafter()], [0.7, 0.3])  # doctest: +SKIP
    """

    def __init__(self, drafters: Sequence[Drafter], weights: Sequence[float] | None = None):
        weights = [1.0] * len(drafters) if weights is None else list(weights)
        if len(drafters) < 2 or len(weights) != len(drafters):
            raise ValueError(
                f"drafters must be at least two with a weight each, got {len(drafters)} and {len(weights)} weights"
            )
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be above 0 and finite, got {weights}")
        readers = [one for one in drafters if getattr(one, "taps", ())]
        if len(readers) > 1:
            names = " and ".join(type(one).__name__ for one in readers)
            raise ValueError(f"at most one drafter may read features of the target, got {names}")
        self.taps: tuple[int, ...] = tuple(getattr(readers[0], "taps", ())) if readers else ()
        self._drafters, self._weights = list(drafters), weights

    def reset(self, batch_size: int) -> None:
        """Hands the call on."""
        self._each("reset", batch_size)

    def keep_rows(self, rows: list[int]) -> None:
        """Hands the call on."""
        self._each("keep_rows", rows)

    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Hands the call on."""
        self._each("observe", token_ids, features, num_tokens)

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns the best `budget` nodes of all trees, best first."""
        trees = [one.propose(context, budget) for one in self._drafters]
        return merge_trees(trees, self._weights, budget)

    def _each(self, name: str, *args: Any) -> None:
        for one in self._drafters:
            if hasattr(one, name):
                getattr(one, name)(*args)


Path = tuple[int, ...]


def merge_trees(trees: Sequence[TokenTree], weights: Sequence[float], budget: int) -> TokenTree:
    """Joins trees with equal roots and keeps the best `budget` nodes by the mixture of their laws, best first.

    Args:
        trees: of equal numbers of rows; in a row, trees of the root alone leave their weight to the others.
        weights: of each tree, above 0.
        budget: most nodes, root included.

    Raises:
        ValueError: a tree has drawn children.
    """
    if any(tree.laws is not None for tree in trees):
        raise ValueError("trees of drawn children cannot be merged: which ones are kept would depend on their tokens")
    roots = trees[0].tokens[:, 0]
    rows = [_merge_row(trees, weights, row, budget) for row in range(len(roots))]
    width = max(len(row) for row in rows)
    columns: list[list[list[Any]]] = [[], [], []]
    for row, root in zip(rows, roots.tolist(), strict=True):
        index = {path: node for node, (path, _) in enumerate(row)}
        padding = width - len(row)
        columns[0].append([path[-1] if path else root for path, _ in row] + [0] * padding)
        columns[1].append([index[path[:-1]] if path else -1 for path, _ in row] + [-1] * padding)
        columns[2].append([score for _, score in row] + [0.0] * padding)
    tree = TokenTree.from_parents(columns[0], columns[1], columns[2], num_nodes=[len(row) for row in rows])
    return tree.to(roots.device)


def _merge_row(trees: Sequence[TokenTree], weights: Sequence[float], row: int, budget: int) -> list[tuple[Path, float]]:
    """Paths (tokens below the root) and mixed log-probabilities of the best nodes of one row, the root first."""
    proposing = [(tree, weight) for tree, weight in zip(trees, weights, strict=True) if int(tree.num_nodes[row]) > 1]
    total = sum(weight for _, weight in proposing)
    mixed: dict[Path, float] = {}
    for tree, weight in proposing:
        paths: list[Path] = []
        count = int(tree.num_nodes[row])
        columns = (tree.tokens[row, :count], tree.parents[row, :count], tree.scores[row, :count])
        for node, (token, parent, score) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            paths.append((*paths[parent], token) if node else ())
            if node:
                mixed[paths[-1]] = mixed.get(paths[-1], 0.0) + weight / total * math.exp(score)
    # A child never has more than its parent, but for rounding; shorter paths come first among equals.
    best = sorted(mixed.items(), key=lambda item: (-item[1], len(item[0])))
    kept: dict[Path, float] = {(): 0.0}
    for path, prob in best:
        if len(kept) == budget:
            break
        if path[:-1] in kept and prob > 0:
            kept[path] = min(math.log(prob), kept[path[:-1]])
    return list(kept.items())
