"""Visibility inside a tree as bits: word w of node i holds bit j where node 64 * w + j is i itself or above it.

Dimension key: B batch, N nodes, W words (ceil(N / 64)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.trees.token_tree import ancestor_mask

WORD = 64


def pack_ancestors(parents: Tensor) -> Tensor:
    """Packs the ancestors of every node, itself included.

    Args:
        parents: int64 [B, N]; parents first, -1 for roots and padding.

    Returns:
        int64 [B, N, W].

    Raises:
        ValueError: `parents` is not int64 [B, N].

    Example:
        >>> pack_ancestors(torch.tensor([[-1, 0, 0, 1]]))[0, :, 0].tolist()
        [1, 3, 5, 11]
    """
    if parents.dim() != 2 or parents.dtype != torch.int64:
        raise ValueError(f"parents must be int64 [B, N], got {parents.dtype} {list(parents.shape)}")
    return pack_bits(ancestor_mask(parents))


def pack_bits(visible: Tensor) -> Tensor:
    """Packs bool [..., N], "may attend", into int64 [..., ceil(N / 64)]."""
    words = -(-visible.shape[-1] // WORD)
    padded = torch.nn.functional.pad(visible, (0, words * WORD - visible.shape[-1])).unflatten(-1, (words, WORD))
    shifts = torch.arange(WORD, device=visible.device)
    return (padded.long() << shifts).sum(-1)


def unpack_bits(words: Tensor, num_nodes: int) -> Tensor:
    """Returns bool [..., N] from int64 [..., W]."""
    shifts = torch.arange(WORD, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)[..., :num_nodes]
