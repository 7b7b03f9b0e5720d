"""RefinedSource: the laws of a further pass over the nodes of a tree, as a candidate source.

Dimension key: B batch, N tree nodes, F frontier slots, K candidates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetflow.protocols import CandidateSource, Frontier
from jetflow.trees.sources import check_dtypes
from jetflow.trees.token_tree import TokenTree


class RefinedSource:
    """Laws of their own for the nodes of a tree, and those of another source for all other nodes.

    A node is known by its path: its token, and its parent's place in the tree.

    Args:
        tree: trees [B, N].
        laws: tokens int64 and log-probabilities float32 of the children of each node, [B, N, K], best first.
        other: answers for nodes outside the tree; with at most K candidates.

    Raises:
        ValueError: the shapes differ, or a dtype is wrong.
    """

    def __init__(self, tree: TokenTree, laws: tuple[Tensor, Tensor], other: CandidateSource):
        tokens, log_probs = laws
        if tokens.dim() != 3 or tokens.shape != log_probs.shape or tokens.shape[:2] != tree.tokens.shape:
            raise ValueError(
                f"laws must be two tensors [B, N, K] for a tree of [B, N] = {list(tree.tokens.shape)}, got "
                f"{list(tokens.shape)} and {list(log_probs.shape)}"
            )
        check_dtypes(tokens, log_probs)
        self.max_depth = other.max_depth
        self._tree, self._other = tree, other
        self._tokens, self._log_probs = tokens, log_probs
        self._places: Tensor | None = None

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K], best first for each parent."""
        tokens, log_probs = self._other(level, frontier)
        self._places = places = self._find(level, frontier)
        outside = (places < 0)[:, :, None]
        width = self._tokens.shape[2]
        rows = places.clamp(min=0)[:, :, None].expand(-1, -1, width)
        missing = width - tokens.shape[2]
        tokens, log_probs = pad(tokens, (0, missing)), pad(log_probs, (0, missing), value=-math.inf)
        return (
            torch.where(outside, tokens, self._tokens.gather(1, rows)),
            torch.where(outside, log_probs, self._log_probs.gather(1, rows)),
        )

    def _find(self, level: int, frontier: Frontier) -> Tensor:
        """Places of the frontier's nodes in the tree, int64 [B, F]; -2, which is nobody's parent, for those outside."""
        if level == 1 or self._places is None:
            return torch.zeros_like(frontier.tokens)
        above = self._places.gather(1, frontier.parents)
        same = (self._tree.parents[:, None] == above[:, :, None]) & (self._tree.tokens[:, None] == frontier.tokens[:, :, None])
        return torch.where(same.any(dim=-1), same.int().argmax(dim=-1), -2)
