"""What the attention layers of a target do in a tree pass; transformers calls it by the name `TREE_ATTENTION`.

Dimension key: B batch, N tree nodes, S cache slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from jetflow import masks
from jetflow.kernels.ancestors import pack_ancestors
from jetflow.kernels.masked_attention import masked_attention
from jetflow.kernels.path_attention import path_attention
from jetflow.kernels.tree_attention import tree_attention
from jetflow.trees.token_tree import TokenTree

TREE_ATTENTION = "jetflow_tree"


@dataclass
class TreeStep:
    """One tree pass as the attention layers see it; travels through the model's keyword arguments."""

    tree: TokenTree
    prefix_lens: Tensor
    num_slots: int
    kernel: str
    block_table: Tensor | None = None
    # In fixed-width mode: where each node's own text lies.
    text_slots: Tensor | None = None

    @cached_property
    def packed(self) -> dict[str, Any]:
        """What the kernel needs besides queries, keys and values; every row has all nodes of the batch's width."""
        tree, device = self.tree, self.tree.tokens.device
        return {
            "bits": pack_ancestors(tree.parents).flatten(0, 1),
            "row_starts": torch.arange(tree.batch_size + 1, device=device, dtype=torch.int32) * tree.max_nodes,
            "prefix_lens": self.prefix_lens.int(),
            "depths": tree.depths.flatten().int(),
            "max_nodes": tree.max_nodes,
            "max_prefix": self.num_slots - tree.max_nodes,
            "block_table": self.block_table,
        }

    @cached_property
    def _masks(self) -> dict[int | None, Tensor | None]:
        return {}

    def mask(self, window: int | None) -> Tensor | None:
        """Returns the mask, bool [B, 1, N, S], for layers with the given sliding window; None where all is visible."""
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        tree = self.tree
        if window is None and tree.batch_size == 1 and tree.max_nodes == 1:
            return None
        rule = masks.tree_causal(tree, self.prefix_lens, window=window)
        return masks.dense(rule, tree.batch_size, 1, tree.max_nodes, self.num_slots, device=tree.tokens.device)


def _tree_attention_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_step: TreeStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in a tree pass, in the form that transformers calls."""
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with soft-capping or sinks is not supported in tree passes")
    if tree_step.kernel == "triton":
        nodes = query.transpose(1, 2)
        out, _ = tree_attention(nodes.flatten(0, 1), key, value, **tree_step.packed, scale=scaling, window=sliding_window)
        return out.view_as(nodes), None
    if tree_step.text_slots is not None:
        out = path_attention(query, key, value, tree_step.text_slots, scale=scaling, window=sliding_window)
        return out.transpose(1, 2).contiguous(), None
    out = masked_attention(query, key, value, tree_step.mask(sliding_window), scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, _tree_attention_layer)
