"""The exact best tree from a heap on the host: pop the best node, push its next sibling and its first child.

For few rows and nodes on a CPU this is several times quicker than growing levels of tensors (`bench/tree_building.py`), whose
trees it repeats node by node, equal scores included. Only laws of parents that become nodes are looked at.

Dimension key: B batch, D levels, R laws of a depth, K candidates of a law, N nodes.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetflow.kernels.expand import level_sizes
from jetflow.trees.growth import NEVER
from jetflow.trees.token_tree import PADDING_PARENT, TokenTree

# Up to so many nodes in all rows together the heap is quicker.
MOST_NODES = 512


class _Nodes(NamedTuple):
    """Columns of a tree, in the order in which nodes were popped."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]


class _Law(NamedTuple):
    """Children of a parent, best first: tokens, float32 log-probabilities, and the law behind each."""

    tokens: list[int]
    log_probs: Any
    laws: list[int]


def best_from_heap(root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, budget: int) -> TokenTree:
    """Builds the best trees of at most `budget` nodes, best first.

    Args:
        root_tokens: int64 [B], on the CPU.
        tokens: int64 [B, D, K], candidates of each depth.
        log_probs: float32 [B, D, R, K] without NaN; R is 1, or K: one law for each candidate of the depth before. Of depth
            1 the first counts. A parent's law is that of the first candidate with its token; of equal tokens under a
            parent the likeliest counts.
        budget: most nodes, root included, above D.

    Returns:
        Trees [B, N], N <= `budget`, as `BestFirst` gives them.
    """
    num_laws, width = log_probs.shape[2:]
    size = min(budget, sum(level_sizes(tokens.shape[1], width, budget)))
    candidates, values = tokens.detach().numpy(), log_probs.detach().numpy()
    rows = [
        _grow(root, candidates[row], values[row], size, shared=num_laws == 1) for row, root in enumerate(root_tokens.tolist())
    ]
    counts = [len(row.tokens) for row in rows]
    padding: tuple[float, ...] = (0, PADDING_PARENT, 0, NEVER)
    found, parents, depths, scores = (
        torch.tensor([row[column] + [empty] * (size - len(row[column])) for row in rows])
        for column, empty in enumerate(padding)
    )
    return TokenTree(found, parents, depths, scores, torch.tensor(counts))


def _grow(root: int, tokens: Any, log_probs: Any, size: int, *, shared: bool) -> _Nodes:
    """One row: at most `size` nodes."""
    depth, laws = len(tokens), _Laws(tokens, log_probs, shared)
    nodes = _Nodes([root], [PADDING_PARENT], [0], [0.0])
    # What each node offers: its children's law, and their scores.
    offers: list[tuple[_Law, list[float]]] = []
    heap: list[tuple[float, int, int, int]] = []

    def offer(node: int, level: int, law: int) -> None:
        found = laws(level, law)
        # Rounded to float32 like sums of tensors. A child of rank r comes behind r others.
        scores = (found.log_probs[: size - node - 1] + np.float32(nodes.scores[node])).tolist()
        offers.append((found, scores))
        if scores and scores[0] > NEVER:
            heapq.heappush(heap, (-scores[0], level, node, 0))

    offer(0, 1, 0)
    while heap and len(nodes.tokens) < size:
        # Equal scores: lower depth, then lower parent, then lower rank.
        _, level, parent, rank = heapq.heappop(heap)
        law, scores = offers[parent]
        nodes.tokens.append(law.tokens[rank])
        nodes.parents.append(parent)
        nodes.depths.append(level)
        nodes.scores.append(scores[rank])
        if rank + 1 < len(scores) and scores[rank + 1] > NEVER:
            heapq.heappush(heap, (-scores[rank + 1], level, parent, rank + 1))
        if level < depth:
            offer(len(nodes.tokens) - 1, level + 1, 0 if shared else law.laws[rank])
        else:
            offers.append((law, []))
    return nodes


class _Laws:
    """Sorts the laws that are asked for, each once."""

    def __init__(self, tokens: Any, log_probs: Any, shared: bool):
        self._tokens, self._log_probs, self._shared = tokens, log_probs, shared
        self._found: dict[tuple[int, int], _Law] = {}
        self._first: dict[int, dict[int, int]] = {}

    def __call__(self, level: int, law: int) -> _Law:
        if (level, law) not in self._found:
            self._found[level, law] = self._sorted(level, law)
        return self._found[level, law]

    def _sorted(self, level: int, law: int) -> _Law:
        values = self._log_probs[level - 1, law]
        order = np.argsort(-values, kind="stable")
        tokens = self._tokens[level - 1][order]
        names = tokens.tolist()
        if len(set(names)) < len(names):
            kept = np.sort(np.unique(tokens, return_index=True)[1])
            order, names = order[kept], tokens[kept].tolist()
        # Rounding may make the log-probability of a certain token more than 0.
        return _Law(names, np.minimum(values[order], 0), [] if self._shared else self._columns(level, names))

    def _columns(self, level: int, names: list[int]) -> list[int]:
        """Which law of the next depth stands behind each token: that of the first candidate which holds it."""
        if level not in self._first:
            places = list(enumerate(self._tokens[level - 1].tolist()))
            self._first[level] = {token: place for place, token in reversed(places)}
        first = self._first[level]
        return [first[token] for token in names]
