"""Anchors: the context positions that training blocks hang off, and which slots of a block are supervised.

Dimension key: B batch, S sequence, A anchors, D slots after the anchor (block_size - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draws anchors among the positions whose next token is supervised, each position at most once per row.

    Args:
        loss_mask: bool [B, S]; True where the token is supervised, that is, to be predicted.
        num_anchors: A, anchors per row, at least 1.
        generator: source of randomness; torch's default one when absent.

    Returns:
        `anchors` int64 [B, A], rising within a row, and `valid` bool [B, A]. A row with fewer than A possible positions
        gets all of them; the rest of its anchors are 0 and not valid.

    Raises:
        ValueError: `loss_mask` is not bool [B, S] or `num_anchors` is below 1.

    Example:
        >>> sample_anchors(torch.tensor([[False, False, True, True]]), 3)
        (tensor([[1, 2, 0]]), tensor([[ True,  True, False]]))
    """
    _check_loss_mask(loss_mask)
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    batch, length = loss_mask.shape
    possible = torch.zeros_like(loss_mask)
    possible[:, :-1] = loss_mask[:, 1:]
    device = generator.device if generator is not None else loss_mask.device
    draws = torch.rand(batch, length, generator=generator, device=device).to(loss_mask.device)
    # Impossible positions sort behind all possible ones, whose draws lie in [0, 1).
    order = draws.masked_fill(~possible, 2.0).argsort(dim=-1)[:, :num_anchors]
    # `length` stands for "no anchor", so that sorting puts it last.
    chosen = order.masked_fill(~possible.gather(1, order), length).sort(dim=-1).values
    anchors = torch.full((batch, num_anchors), length, dtype=torch.int64, device=loss_mask.device)
    anchors[:, : chosen.shape[1]] = chosen
    valid = anchors < length
    return anchors.masked_fill(~valid, 0), valid


def supervised_slots(loss_mask: Tensor, anchors: Tensor, *, valid: Tensor, block_size: int) -> Tensor:
    """Says which slots of each block are trained: those up to the end of the supervised span behind the anchor.

    Args:
        loss_mask: bool [B, S]; True where the token is supervised.
        anchors: int64 [B, A].
        valid: bool [B, A]; blocks of other anchors have no supervised slot.
        block_size: positions in a block, anchor included; at least 2.

    Returns:
        bool [B, A, D]; entry i - 1 stands for slot i and is True where the tokens at `anchor + 1 .. anchor + i` all
        exist and are supervised, so the supervised slots of a block always come first.

    Raises:
        ValueError: `loss_mask` is not bool [B, S] or `block_size` is below 2.
    """
    _check_loss_mask(loss_mask)
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    length = loss_mask.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)
    flat = positions.clamp(max=length - 1).flatten(1)
    supervised = loss_mask.gather(1, flat).view_as(positions) & (positions < length) & valid.unsqueeze(-1)
    return supervised.cumprod(dim=-1).bool()


def _check_loss_mask(loss_mask: Tensor) -> None:
    if loss_mask.dim() != 2 or loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool [B, S], got {loss_mask.dtype} {tuple(loss_mask.shape)}")
