"""Mask rules: who may attend to whom. Each builder returns a FlexAttention mask_mod `(b, h, q_idx, kv_idx) -> bool`.

Index tensors broadcast against each other; True means "may attend".

Layout of packed anchors (training): keys are `[context S | block 0 | ... | block A-1]`, queries are the A blocks of
T positions each.
    1. A query of block a sees context positions strictly before its anchor.
    2. It sees its own block by the in-block rule: causal (JetFlow, positions up to its own) or all of it (DFlash).
    3. Where a row holds several documents, it sees context of its anchor's document only.
    4. With a window it sees context positions above its own minus the window only; slot i of block a is at
       `anchors[b, a] + i`. Blocks are no longer than a window, so that none is cut.
    5. It sees nothing else; in particular no other block.

Layout of a tree (verification): row b's keys are `[its prefix_lens[b] committed tokens | its N nodes]`, queries are the
N nodes.
    1. A node sees every committed token of its row, its ancestors and itself.
    2. With a window it sees of those only positions above its own minus the window; a node's position is
       `prefix_lens[b] + depth`.
    3. Padded nodes see themselves and the committed tokens, so that no row is empty. Slots behind the nodes are unseen.

Dimension key: B batch, S sequence, A anchors, T block size, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.protocols import MaskMod
from jetflow.trees.token_tree import TokenTree


def and_masks(*rules: MaskMod) -> MaskMod:
    """Returns the rule that allows what all of `rules` allow."""

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = rules[0](b, h, q_idx, kv_idx)
        for other in rules[1:]:
            allowed = allowed & other(b, h, q_idx, kv_idx)
        return allowed

    return rule


def or_masks(*rules: MaskMod) -> MaskMod:
    """Returns the rule that allows what any of `rules` allows."""

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = rules[0](b, h, q_idx, kv_idx)
        for other in rules[1:]:
            allowed = allowed | other(b, h, q_idx, kv_idx)
        return allowed

    return rule


def causal() -> MaskMod:
    """A position sees itself and everything before it."""

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    return rule


def sliding_window(window: int) -> MaskMod:
    """A position sees itself and the `window - 1` positions before it.

    Raises:
        ValueError: `window` is below 1.
    """
    _check_at_least_one("window", window)

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx > q_idx - window)

    return rule


def same_document(document_ids: Tensor) -> MaskMod:
    """A position sees positions of its own document only; `document_ids` is int64 [B, S]."""

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document_ids[b, q_idx] == document_ids[b, kv_idx]

    return rule


def context_before_anchor(anchors: Tensor, block_size: int, context_len: int) -> MaskMod:
    """Queries of block a see context positions strictly before `anchors[b, a]`, int64 [B, A].

    The features at the anchor itself do not exist yet when the block is drafted.
    """
    _check_at_least_one("block_size", block_size)

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < context_len) & (kv_idx < anchors[b, q_idx // block_size])

    return rule


def in_block(*, causal: bool, block_size: int, context_len: int) -> MaskMod:
    """Queries see their own block: up to their own position when `causal` (JetFlow), all of it otherwise (DFlash)."""
    _check_at_least_one("block_size", block_size)

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slot = kv_idx - context_len
        same = (slot >= 0) & (slot // block_size == q_idx // block_size)
        return same & (slot <= q_idx) if causal else same

    return rule


def anchor_document(anchors: Tensor, block_size: int, document_ids: Tensor) -> MaskMod:
    """Queries of block a see context positions of the document that holds `anchors[b, a]`; ids are int64 [B, S]."""
    _check_at_least_one("block_size", block_size)
    own, last = document_ids.gather(1, anchors), document_ids.shape[1] - 1

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return own[b, q_idx // block_size] == document_ids[b, kv_idx.clamp(max=last)]

    return rule


def context_in_window(anchors: Tensor, block_size: int, window: int) -> MaskMod:
    """Slot i of block a sees context positions above `anchors[b, a] + i - window`; anchors are int64 [B, A].

    Raises:
        ValueError: `window` is below `block_size`.
    """
    if window < block_size:
        raise ValueError(f"window={window} must be at least block_size={block_size}")

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > anchors[b, q_idx // block_size] + q_idx % block_size - window

    return rule


def anchor_blocks(
    anchors: Tensor,
    block_size: int,
    context_len: int,
    *,
    causal: bool,
    document_ids: Tensor | None = None,
    window: int | None = None,
) -> MaskMod:
    """The packed training mask: context before the anchor, or the query's own block.

    Args:
        anchors: int64 [B, A].
        block_size: positions T of a block, anchor included.
        context_len: context positions S, which come first among the keys.
        causal: in-block rule; see `in_block`.
        document_ids: int64 [B, S], for rows that hold several documents; a block sees that of its anchor only.
        window: sliding window in positions, the query's own included; none when absent.

    Raises:
        ValueError: `block_size` is below 1, or `window` below `block_size`.
    """
    context = context_before_anchor(anchors, block_size, context_len)
    if window is not None:
        context = and_masks(context, context_in_window(anchors, block_size, window))
    if document_ids is not None:
        context = and_masks(context, anchor_document(anchors, block_size, document_ids))
    return or_masks(context, in_block(causal=causal, block_size=block_size, context_len=context_len))


def tree_causal(tree: TokenTree, prefix_lens: Tensor, *, window: int | None = None) -> MaskMod:
    """The verifier's mask: a node sees the committed prefix, its ancestors and itself.

    Args:
        tree: trees [B, N].
        prefix_lens: int64 [B], committed tokens of each row.
        window: sliding window in positions, the node's own included; none when absent.

    Raises:
        ValueError: `window` is below 1.
    """
    if window is not None:
        _check_at_least_one("window", window)
    ancestors = tree.ancestor_mask()
    last = tree.max_nodes - 1

    def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slot = kv_idx - prefix_lens[b]
        node = slot.clamp(0, last)
        allowed = (slot < 0) | ((slot <= last) & ancestors[b, q_idx, node])
        if window is None:
            return allowed
        position = prefix_lens[b] + tree.depths[b, q_idx]
        key_position = torch.where(slot < 0, kv_idx, prefix_lens[b] + tree.depths[b, node])
        return allowed & (key_position > position - window)

    return rule


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
