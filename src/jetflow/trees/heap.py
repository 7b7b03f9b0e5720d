"""The exact best tree from a heap on the host: pop the best node, push its next sibling and its first child.

For few rows and nodes on a CPU this is several times quicker than growing levels of tensors (`bench/tree_building.py`), whose
trees it repeats node by node, equal scores included. Only laws of parents that become nodes are looked at.

Dimension key: B batch, D levels, R laws of a depth, K candidates of a law, N nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
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
    """Children of a parent, best first: places among the depth's candidates, and float32 log-probabilities."""

    places: list[int]
    log_probs: Any


class _Depth(NamedTuple):
    """Candidates of a depth: their tokens, the first place that holds the same token, and whether these are all others."""

    tokens: list[int]
    firsts: Sequence[int]
    unique: bool


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
    depth, laws = len(tokens), _Laws(tokens, log_probs)
    nodes = _Nodes([root], [PADDING_PARENT], [0], [0.0])
    # What each node offers: its children's places, and their scores.
    offers: list[tuple[list[int], list[float]]] = []
    heap: list[tuple[float, int, int, int]] = []

    def offer(node: int, level: int, law: int) -> None:
        found = laws(level, law)
        # Rounded to float32 like sums of tensors. A child of rank r comes behind r others.
        scores = (found.log_probs[: size - node - 1] + np.float32(nodes.scores[node])).tolist()
        offers.append((found.places, scores))
        if scores and scores[0] > NEVER:
            heapq.heappush(heap, (-scores[0], level, node, 0))

    offer(0, 1, 0)
    while heap and len(nodes.tokens) < size:
        # Equal scores: lower depth, then lower parent, then lower rank.
        _, level, parent, rank = heapq.heappop(heap)
        places, scores = offers[parent]
        candidates = laws.depths[level - 1]
        nodes.tokens.append(candidates.tokens[places[rank]])
        nodes.parents.append(parent)
        nodes.depths.append(level)
        nodes.scores.append(scores[rank])
        if rank + 1 < len(scores) and scores[rank + 1] > NEVER:
            heapq.heappush(heap, (-scores[rank + 1], level, parent, rank + 1))
        if level < depth:
            offer(len(nodes.tokens) - 1, level + 1, 0 if shared else candidates.firsts[places[rank]])
        else:
            offers.append(([], []))
    return nodes


class _Laws:
    """Sorts the laws that are asked for, each once."""

    def __init__(self, tokens: Any, log_probs: Any):
        self._tokens, self._log_probs = tokens, log_probs
        self.depths: list[_Depth] = []
        self._found: dict[tuple[int, int], _Law] = {}

    def __call__(self, level: int, law: int) -> _Law:
        if level > len(self.depths):
            # Levels are reached one after the other.
            self.depths.append(_candidates(self._tokens[level - 1].tolist()))
        if (level, law) not in self._found:
            self._found[level, law] = self._sorted(self._log_probs[level - 1, law], self.depths[level - 1])
        return self._found[level, law]

    def _sorted(self, values: Any, candidates: _Depth) -> _Law:
        order = np.argsort(-values, kind="stable")
        if not candidates.unique:
            # Of equal tokens the likeliest is left.
            firsts = np.array(candidates.firsts)[order]
            order = order[np.sort(np.unique(firsts, return_index=True)[1])]
        # Rounding may make the log-probability of a certain token more than 0.
        return _Law(order.tolist(), np.minimum(values[order], 0))


def _candidates(tokens: list[int]) -> _Depth:
    if len(set(tokens)) == len(tokens):
        return _Depth(tokens, range(len(tokens)), True)
    first = {token: place for place, token in reversed(list(enumerate(tokens)))}
    return _Depth(tokens, [first[token] for token in tokens], False)
