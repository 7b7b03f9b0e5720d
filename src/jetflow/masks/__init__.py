"""Masks: rules as FlexAttention mask_mods, and the one place that turns them into tensors."""

from jetflow.masks.build import additive, block_mask, dense
from jetflow.masks.rules import (
    anchor_blocks,
    and_masks,
    causal,
    context_before_anchor,
    context_in_window,
    in_block,
    or_masks,
    same_document,
    sliding_window,
    tree_causal,
)

__all__ = [
    "additive",
    "anchor_blocks",
    "and_masks",
    "block_mask",
    "causal",
    "context_before_anchor",
    "context_in_window",
    "dense",
    "in_block",
    "or_masks",
    "same_document",
    "sliding_window",
    "tree_causal",
]
