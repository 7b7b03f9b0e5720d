"""Attention whose result for a node depends on its own text alone, to the last bit: the verifier's fixed-width mode.

The keys of a node stand in the order of its text, prefix then ancestors, whatever slots they lie in, and sums go over chunks
of fixed size in that order; chunks behind a node's last token add exact zeros. It reads every key once per node and is meant
for exactness, not for speed.

Dimension key: Hq query heads, Hk key-value heads, G = Hq / Hk, N nodes, S slots, L positions, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.trees.token_tree import TokenTree

CHUNK = 64


def text_slots(tree: TokenTree, prefix_len: int) -> Tensor:
    """Slot of every position of each node's own text, int64 [N, L] for a tree of one row; -1 behind the node.

    L is a multiple of the chunk; node n of the tree lies in slot `prefix_len + n`.
    """
    depths, parents = tree.depths[0], tree.parents[0].clamp(min=0)
    longest = prefix_len + int(depths.max()) + 1
    length = -(-longest // CHUNK) * CHUNK
    slots = torch.arange(length, device=depths.device).expand(len(depths), -1).clone()
    slots[:, prefix_len:] = -1
    node = torch.arange(len(depths), device=depths.device)
    # From each node up to the root; those that are there stay there.
    for _ in range(int(depths.max()) + 1):
        slots.scatter_(1, (prefix_len + depths[node])[:, None], prefix_len + node[:, None])
        node = parents[node]
    return slots


def path_attention(
    query: Tensor, key: Tensor, value: Tensor, slots: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attends over each node's own text, in float32.

    Args:
        query: float [1, Hq, N, D].
        key: float [1, Hk, S, D].
        value: float [1, Hk, S, D].
        slots: int64 [N, L], see `text_slots`.
        scale: factor on the logits, 1 / sqrt(D) when absent.
        window: sliding window in positions, the node's own included.

    Returns:
        float [1, Hq, N, D] in the dtype of `query`.
    """
    heads, nodes, dim = query.shape[1:]
    groups = query[0].float().unflatten(0, (key.shape[1], -1)).transpose(1, 2)
    visible = slots >= 0
    if window is not None:
        last = visible.sum(1, keepdim=True) - 1
        visible &= torch.arange(slots.shape[1], device=slots.device) > last - window
    safe = slots.clamp(min=0)
    chunks = range(0, slots.shape[1], CHUNK)
    factor = dim**-0.5 if scale is None else scale
    logits = [groups @ key[0][:, safe[:, start : start + CHUNK]].float().mT * factor for start in chunks]
    logits = [
        one.masked_fill(~visible[:, None, start : start + CHUNK], float("-inf"))
        for one, start in zip(logits, chunks, strict=True)
    ]
    best = torch.stack([one.amax(-1, keepdim=True) for one in logits]).amax(0)
    total = torch.zeros_like(best)
    out = torch.zeros_like(groups)
    for one, start in zip(logits, chunks, strict=True):
        weights = (one - best).exp()
        total = total + weights.sum(-1, keepdim=True)
        out = out + weights @ value[0][:, safe[:, start : start + CHUNK]].float()
    return (out / total).transpose(1, 2).reshape(1, heads, nodes, dim).to(query.dtype)
