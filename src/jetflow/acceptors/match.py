"""The match rules: the target takes its own token, and the path goes on while that token is a child. Both are lossless.

Dimension key: B batch, N nodes, D levels, P path length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jetflow.acceptors.target_law import TargetLaw, check_logits, has_law
from jetflow.kernels import dispatch
from jetflow.kernels.walk import accept_walk
from jetflow.protocols import Acceptance
from jetflow.trees.token_tree import TokenTree

# Below this temperature the target's law is its argmax for every practical logit gap, and logits / T could overflow.
GREEDY_TEMPERATURE = 1e-4


class GreedyAcceptor:
    """Follows the target's most likely token (the lowest id on a tie) while it is a child of the current node.

    Example:
        >>> tree = TokenTree.from_parents([[5, 7, 8]], [[-1, 0, 0]])
        >>> logits = torch.zeros(1, 3, 10)
        >>> logits[0, 0, 8] = logits[0, 2, 3] = 1.0
        >>> acceptance = GreedyAcceptor()(tree, logits)
        >>> acceptance.path.tolist(), acceptance.bonus.tolist()
        ([[0, 2]], [3])
    """

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Walks all rows at once.

        Args:
            tree: trees [B, N].
            logits: target logits, float [B, N, V].
            generator: not used.

        Returns:
            The accepted path of each row.
        """
        check_logits(tree, logits)
        values, tokens = logits.max(dim=-1)
        usable = torch.where(values > float("-inf"), tokens, -1)
        if dispatch.runs_kernels(logits):
            return Acceptance(*accept_walk(tree.tokens, tree.parents, tree.num_nodes, usable, int(tree.depths.max())))
        chosen = usable.tolist()
        return _follow(tree, lambda nodes: [row[node] for row, node in zip(chosen, nodes, strict=True)])


class SamplingAcceptor:
    """Draws the target's token at each node on the walk and follows it while it is a child.

    Every emitted token is the target's own sample, so the output has exactly the target's law after temperature, top-k
    and top-p, for every tree whose shape does not depend on the draws.

    Args:
        temperature: softmax temperature; 0, or anything below 1e-4, is greedy.
        top_k: keep this many most likely tokens.
        top_p: keep the smallest set of tokens with at least this probability.

    Raises:
        ValueError: temperature below 0, top_k below 1, or top_p outside (0, 1].
    """

    def __init__(self, temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None):
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        self.temperature = temperature
        self._law = TargetLaw(max(temperature, GREEDY_TEMPERATURE), top_k=top_k, top_p=top_p)

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Walks all rows at once; see `GreedyAcceptor`. `generator` must be on the device of `logits`."""
        if self.temperature < GREEDY_TEMPERATURE:
            return GreedyAcceptor()(tree, logits)
        check_logits(tree, logits)
        rows = torch.arange(tree.batch_size, device=logits.device)

        def draw(nodes: list[int]) -> list[int]:
            scores = logits[rows, torch.tensor(nodes, device=logits.device)]
            tokens = torch.multinomial(self._law(scores), 1, generator=generator)[:, 0]
            return torch.where(has_law(scores), tokens, -1).tolist()

        return _follow(tree, draw)


def _follow(tree: TokenTree, next_tokens: Callable[[list[int]], list[int]]) -> Acceptance:
    """Walks from the roots on the host: `next_tokens` gives the target's token at one node of each row."""
    parents, tokens, counts = tree.parents.tolist(), tree.tokens.tolist(), tree.num_nodes.tolist()
    children = [{(parents[row][node], tokens[row][node]): node for node in range(1, count)} for row, count in enumerate(counts)]
    paths: list[list[int]] = [[0] for _ in counts]
    bonus = next_tokens([0] * len(counts))
    moving = list(range(len(counts)))
    while True:
        moving = [row for row in moving if (paths[row][-1], bonus[row]) in children[row]]
        if not moving:
            break
        for row in moving:
            paths[row].append(children[row][paths[row][-1], bonus[row]])
        drawn = next_tokens([path[-1] for path in paths])
        for row in moving:
            bonus[row] = drawn[row]
    longest = max(len(path) for path in paths)
    padded = [path + [path[-1]] * (longest - len(path)) for path in paths]
    device = tree.tokens.device
    return Acceptance(
        torch.tensor(padded, device=device),
        torch.tensor([len(path) - 1 for path in paths], device=device),
        torch.tensor(bonus, device=device),
    )
