"""How the blocks of a training pass are laid out: which slots are masked, which hold true tokens, and who predicts what.

In a masked block `[token at anchor, MASK, MASK, ...]` slot i predicts its own token, the one at anchor + i. A head with
refinement also learns from blocks whose slots 1 .. m hold the true tokens: there the slots 0 .. m, which know their own
token, predict the next one, and the masked slots behind them predict their own. A slot never predicts what it holds.

Dimension key: B batch, S sequence, A anchors, T block size, D slots after the anchor (T - 1), M supervised slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jetflow import masks
from jetflow.heads.config import DraftHeadConfig
from jetflow.targets import Target

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskForm = Callable[..., "Tensor | BlockMask"]
# The golden section: its multiples, taken modulo 1, fill the unit interval evenly however many there are.
GOLDEN = 0.6180339887498949


def visible_prefixes(num_blocks: int, block_size: int, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Draws how many true tokens each block of a row shows behind its anchor; 0 in masked blocks.

    Filled blocks are spread evenly over the row, and so are their lengths: half of them are filled whole, as the nodes
    of a tree are, the others up to a place that is uniform in 1 .. T - 1. Only two numbers are drawn, so that a block's
    length depends on these and on its place alone, not on how many rows or blocks run together.

    Args:
        num_blocks: A.
        block_size: T.
        share: of the blocks that are filled.
        generator: source of randomness; torch's default one when absent.

    Returns:
        int64 [A], on the CPU.

    Raises:
        ValueError: `share` is not in [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"filled_share must be in [0, 1], got {share}")
    device = "cpu" if generator is None else generator.device
    offset, phase = torch.rand(2, generator=generator, device=device, dtype=torch.float64).tolist()
    filled = evenly_spread(torch.arange(1, num_blocks + 1), share, offset)
    places = (phase + GOLDEN * filled.cumsum(0).double()) % 1.0
    lengths = 1 + (places * 2 * (block_size - 1)).long()
    return torch.where(filled, lengths.clamp(max=block_size - 1), 0)


def evenly_spread(counts: Tensor, share: float, offset: float = 0.0) -> Tensor:
    """Picks a share of the items with these running numbers, int64 [...] from 1, at even distances; bool [...]."""
    numbers = counts.double()
    return (numbers * share + offset).floor() > ((numbers - 1) * share + offset).floor()


def block_tokens(token_ids: Tensor, anchors: Tensor, visible: Tensor, config: DraftHeadConfig) -> Tensor:
    """Returns int64 [B, A, T]: the token at the anchor, `visible` [A] true tokens behind it, then masks."""
    slots = torch.arange(config.block_size, device=anchors.device)
    tokens = _tokens_at(token_ids, anchors.unsqueeze(-1) + slots)
    return torch.where(slots <= visible[:, None], tokens, config.mask_token_id)


def attention_masks(
    config: DraftHeadConfig, anchors: Tensor, context_len: int, document_ids: Tensor | None, mask_form: MaskForm
) -> dict[str, Tensor | BlockMask]:
    """Returns the head's `mask` for packed blocks, and a `window_mask` where it has windowed layers.

    Args:
        config: of the head.
        anchors: int64 [B, A].
        context_len: S.
        document_ids: int64 [B, S], or None for one document per row.
        mask_form: how they are stored, such as `masks.dense`.
    """
    rows, queries = anchors.shape[0], anchors.shape[1] * config.block_size

    def built(causal: bool, window: int | None) -> Tensor | BlockMask:
        rule = masks.anchor_blocks(
            anchors, config.block_size, context_len, causal=causal, document_ids=document_ids, window=window
        )
        return mask_form(rule, rows, 1, queries, context_len + queries, device=anchors.device)

    found = {"mask": built(config.causal, None)}
    if config.window is not None:
        found["window_mask"] = built(config.window.causal, config.window.size)
    return found


def slot_places(slots: Tensor, by_block: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Row, block and depth (from 0) of every supervised slot, int64 [M], or of all slots of blocks that have some, [M, D]."""
    if not by_block:
        rows, blocks, depths = slots.nonzero(as_tuple=True)
        return rows, blocks, depths
    rows, blocks = slots.any(-1).nonzero(as_tuple=True)
    depths = torch.arange(slots.shape[2], device=slots.device).expand(len(rows), -1)
    return rows[:, None].expand_as(depths), blocks[:, None].expand_as(depths), depths


def predicting_slots(blocks: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
    """Returns int64 [M], the slot of each supervised token: its own if masked, the one before it if that is filled.

    Args:
        blocks: int64 [M], block of each token in its row.
        depths: int64 [M], places behind the anchor, from 0 for the token at anchor + 1.
        visible: int64 [A], see `visible_prefixes`.
    """
    prefix = visible[blocks]
    return torch.where((prefix > 0) & (depths <= prefix), depths, depths + 1)


@torch.no_grad()
def previous_embeds(
    target: Target,
    token_ids: Tensor,
    anchors: Tensor,
    visible: Tensor,
    *,
    block_size: int,
    marginal_share: float,
    correct_filled: bool,
) -> Tensor:
    """Embeddings [B, A * T, H] of the true token before the one that each slot predicts, which a correction reads.

    That is a filled slot's own token. Rows of zeros, which leave a slot uncorrected, stand in the anchor's slot of masked
    blocks, in all slots of a share of the masked blocks, and in filled slots unless `correct_filled`.
    """
    slots = torch.arange(block_size, device=anchors.device)
    masked = visible == 0
    filled = (slots <= visible[:, None]) & ~masked[:, None]
    embeds = target.embed(_tokens_at(token_ids, anchors.unsqueeze(-1) + slots - 1 + filled.long()).flatten(1))
    # Spread evenly over the anchors, which are drawn at random, whatever the number of rows that run together.
    marginal = masked & evenly_spread(masked.cumsum(0), marginal_share)
    known = ((slots > visible[:, None]) & ~marginal[:, None]) | (filled & correct_filled)
    return embeds * known.flatten()[:, None]


def _tokens_at(token_ids: Tensor, positions: Tensor) -> Tensor:
    """Tokens [B, A, T] at positions [B, A, T]; those outside the sequence are moved to its ends."""
    places = positions.clamp(0, token_ids.shape[1] - 1)
    return token_ids.gather(1, places.flatten(1)).view_as(places)
