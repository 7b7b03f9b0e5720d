"""Acceptance walk: from the root down, to the child that holds the target's token, for all rows at once on the device.

`accept_walk` runs in Triton, `accept_walk_reference` is its plain PyTorch twin with the same signature.

Dimension key: B batch, N nodes, P path length (deepest level + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_NODES = 1024


def accept_walk(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, chosen: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the target's choice.

    Args:
        tokens: int64 [B, N].
        parents: int64 [B, N], -1 for roots and padding.
        num_nodes: int64 [B], nodes in use.
        chosen: int64 [B, N], the target's token behind each node; one that is no child of it (such as -1) ends the walk.
        max_depth: the deepest level of the trees.

    Returns:
        The path int64 [B, max_depth + 1], its last node repeated; the accepted drafted nodes int64 [B]; and the target's token
        behind the last of them, int64 [B].

    Raises:
        ValueError: shapes or dtypes do not fit, N is above 1024, or `max_depth` is negative.
    """
    from jetflow.kernels.walk_triton import accept_walk_op

    _check(tokens, parents, num_nodes, chosen, max_depth)
    return accept_walk_op(tokens, parents, num_nodes, chosen, max_depth)


def accept_walk_reference(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, chosen: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`accept_walk` in plain PyTorch, without reading anything back."""
    _check(tokens, parents, num_nodes, chosen, max_depth)
    used = torch.arange(tokens.shape[1], device=tokens.device) < num_nodes[:, None]
    # A node is right when its parent's choice is its token; at most one child of a node is.
    right = used & (parents >= 0) & (chosen.gather(1, parents.clamp(min=0)) == tokens)
    node = torch.zeros_like(num_nodes)
    path, accepted = [node], torch.zeros_like(num_nodes)
    for _ in range(max_depth):
        child = right & (parents == node[:, None])
        found = child.any(1)
        node = torch.where(found, child.int().argmax(1), node)
        accepted = accepted + found
        path.append(node)
    return torch.stack(path, dim=1), accepted, chosen.gather(1, node[:, None])[:, 0]


def _check(tokens: Tensor, parents: Tensor, num_nodes: Tensor, chosen: Tensor, max_depth: int) -> None:
    for name, one, shape in (
        ("tokens", tokens, tokens.shape[:2]),
        ("parents", parents, tokens.shape),
        ("num_nodes", num_nodes, tokens.shape[:1]),
        ("chosen", chosen, tokens.shape),
    ):
        if one.dtype != torch.int64 or one.shape != shape or tokens.dim() != 2:
            raise ValueError(f"{name} must be int64 {list(shape)}, got {one.dtype} {list(one.shape)}")
    if tokens.shape[1] > MAX_NODES:
        raise ValueError(f"trees must have at most {MAX_NODES} nodes, got {tokens.shape[1]}")
    if max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
