"""The target's law after all processing, and a drawn tree as rules with a draft law see it.

Dimension key: B batch, N nodes, R draws, K drawable tokens, V vocabulary, M rows of laws.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jetflow.trees.token_tree import TokenTree


class TargetLaw:
    """p: the softmax of the target's logits after temperature, top-k and top-p.

    Args:
        temperature: softmax temperature, above 0.
        top_k: keep this many most likely tokens.
        top_p: keep the smallest set of tokens with at least this probability.

    Raises:
        ValueError: temperature not above 0, top_k below 1, or top_p outside (0, 1].
    """

    def __init__(self, temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None):
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        self._warpers = _warpers(temperature, top_k, top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns probabilities float32 [M, V] of `logits` [M, V]; an even law where there is none."""
        # Rows without a law get an even one, so that a draw runs; callers mark their token.
        scores = torch.where(has_law(logits)[:, None], logits.float(), 0.0)
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores.softmax(dim=-1)


def has_law(logits: Tensor) -> Tensor:
    """Bool [...]: whether logits [..., V] have a law: unless the best is NaN (as it is when any is) or -inf."""
    return logits.max(dim=-1).values > float("-inf")


def check_logits(tree: TokenTree, logits: Tensor) -> None:
    """Raises ValueError unless `logits` are [B, N, V] for the tree's [B, N]."""
    if logits.dim() != 3 or logits.shape[:2] != tree.tokens.shape:
        raise ValueError(f"logits must be [B, N, V] with [B, N] = {list(tree.tokens.shape)}, got {list(logits.shape)}")


class DrawnTree:
    """A tree with the order in which children were drawn.

    Attributes:
        drawn: bool [B, N], nodes that were drawn from the draft's law at their parent; the others are fixed children.
        children: int64 [B, N, R], the drawn children of each node in the order of the draws; -1 where there is none.
    """

    def __init__(self, tree: TokenTree, vocab_size: int):
        self._tree, self._vocab_size = tree, vocab_size
        batch, nodes = tree.tokens.shape
        above = tree.parents.clamp(min=0)
        if tree.laws is None:
            self.drawn = torch.zeros_like(tree.node_mask)
            self.children = tree.parents.new_full((batch, nodes, 0), -1)
            return
        rows = above[:, :, None].expand_as(tree.laws.tokens)
        offered = (tree.laws.tokens.gather(1, rows) == tree.tokens[:, :, None]) & (tree.laws.probs.gather(1, rows) > 0)
        self.drawn = offered.any(-1) & tree.node_mask & (tree.parents >= 0)
        # The root and fixed children land in a spare column, which is cut off.
        width = offered.shape[2]
        rank = torch.where(self.drawn, offered.int().argmax(-1), width)
        table = tree.parents.new_full((batch, nodes * (width + 1)), -1)
        places = torch.arange(nodes, device=above.device).expand_as(above)
        table.scatter_(1, above * (width + 1) + rank, torch.where(self.drawn, places, -1))
        table = table.view(batch, nodes, width + 1)[..., :width]
        used = (table >= 0).flatten(0, 1).any(0).nonzero()
        self.children = table[..., : int(used.max()) + 1 if len(used) else 0]

    def draft_law(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """q behind the nodes [M] of rows [M], float32 [M, V]; zeros where no child was drawn."""
        out = torch.zeros(len(rows), self._vocab_size, device=nodes.device)
        laws = self._tree.laws
        if laws is None:
            return out
        return out.scatter_add_(1, laws.tokens[rows, nodes], laws.probs[rows, nodes])

    def fixed_child(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """The fixed child of each row's node [B] that holds `tokens` [B], int64 [B]; -1 where there is none."""
        tree = self._tree
        same = (tree.parents == nodes[:, None]) & (tree.tokens == tokens[:, None]) & tree.node_mask & ~self.drawn
        return torch.where(same.any(-1), same.int().argmax(-1), -1)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """norm((P - Q)+) [M, V], what is left of P after a rejected draw from Q; P itself where rounding leaves nothing."""
    left = (target - draft).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, target)


def without(draft: Tensor, tokens: Tensor) -> Tensor:
    """norm(Q without a token) [M, V]: the law of the next draw without replacement; zeros where nothing is left."""
    left = draft.scatter(1, tokens[:, None], 0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, left)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws a token int64 [M] from each law [M, V]."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws float64 numbers of the shape of `like` from [0, 1)."""
    device = generator.device if generator is not None else like.device
    return torch.rand(like.shape, generator=generator, device=device, dtype=torch.float64).to(like.device)


def _warpers(temperature: float, top_k: int | None, top_p: float | None) -> list[Callable]:
    """transformers' own warpers, in its own order, so that their meaning cannot differ."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Callable] = []
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers
