"""Warm starts: a head to train on from one that exists, for the same or another target of equal width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.window import WindowedLayers
from jetflow.targets import Target


def warm_start(
    head: BlockDraftHead,
    target: Target,
    *,
    block_size: int | None = None,
    num_layers: int | None = None,
    taps: Sequence[int] | None = None,
    causal: bool | None = None,
    window: WindowedLayers | None = None,
    mask_token_id: int | None = None,
    correction: str | None = None,
    correction_rank: int | None = None,
    refinement: bool | None = None,
) -> BlockDraftHead:
    """Returns a new head that holds the weights of `head` as far as they fit what is asked for.

    No weight depends on block size, in-block rule, mask token or target but for the widths, so these can change freely.
    With fewer layers the first ones are kept, with their windows; layers cannot be added. With another choice of taps the
    fusing matrix keeps the columns of the taps that stay, and those of new ones start at zero.

    Args:
        head: the head to start from, such as a public DFlash or JetSpec head.
        target: the model that the new head is for.
        block_size: of the new head; as in `head` when absent, like all that follow.
        num_layers: draft layers.
        taps: tapped layers of `target`.
        causal: in-block rule of all layers; True turns a DFlash head into a JetFlow one.
        window: layers that see the last positions alone.
        mask_token_id: token that fills the positions to draft.
        correction: kind of correction; one that `head` does not have starts at zero.
        correction_rank: its rank.
        refinement: slots that hold a token predict the next one.

    Raises:
        ValueError: the widths of head and target differ, more layers are asked for than `head` has, or `head` has parts
            that are not trained here.
    """
    old = head.config
    if not old.is_plain:
        raise ValueError(
            f"head has correction={old.correction!r} and {old.published}; only JetFlow and DFlash heads are trained"
        )
    for name, ours, theirs in (
        ("hidden_size", old.hidden_size, target.hidden_size),
        ("target_hidden_size", old.target_hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise ValueError(f"head has {name}={ours}, but the target is {theirs} wide; a warm start needs equal widths")
    layers = old.num_layers if num_layers is None else num_layers
    if layers > old.num_layers:
        raise ValueError(f"num_layers={layers} must be at most {old.num_layers}, the layers of the head to start from")
    new = BlockDraftHead(
        replace(
            old,
            block_size=old.block_size if block_size is None else block_size,
            num_layers=layers,
            taps=old.taps if taps is None else tuple(taps),
            causal=old.causal if causal is None else causal,
            window=_kept_window(old.window, layers, causal) if window is None else window,
            mask_token_id=old.mask_token_id if mask_token_id is None else mask_token_id,
            correction=old.correction if correction is None else correction,
            correction_rank=old.correction_rank if correction_rank is None else correction_rank,
            refinement=old.refinement if refinement is None else refinement,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            rope_parameters=dict(target.config.rope_parameters),
            max_position_embeddings=target.max_positions,
        )
    )
    target.check_taps(new.config.taps)
    weights = head.state_dict()
    weights["fc.weight"] = _fused_columns(weights["fc.weight"], old.taps, new.config.taps)
    # A correction of another kind or rank starts anew.
    same = (old.correction, old.correction_rank) == (new.config.correction, new.config.correction_rank)
    for name, fresh in new.state_dict().items():
        if name.startswith("correction.") and not same:
            weights[name] = fresh
    new.load_state_dict({name: weights[name].float() for name in new.state_dict()})
    return new


def _kept_window(window: WindowedLayers | None, num_layers: int, causal: bool | None) -> WindowedLayers | None:
    """The windows of the first `num_layers` layers, under the in-block rule that is asked for."""
    if window is None or min(window.layers) >= num_layers:
        return None
    kept = tuple(index for index in window.layers if index < num_layers)
    return replace(window, layers=kept, causal=window.causal if causal is None else causal)


def _fused_columns(weight: torch.Tensor, old_taps: Sequence[int], new_taps: Sequence[int]) -> torch.Tensor:
    """Rearranges the columns of the fusing matrix [H, k * Ht], which stand in the order of the taps."""
    parts = dict(zip(old_taps, weight.chunk(len(old_taps), dim=1), strict=True))
    width = weight.shape[1] // len(old_taps)
    return torch.cat([parts.get(tap, weight.new_zeros(len(weight), width)) for tap in new_taps], dim=1)
