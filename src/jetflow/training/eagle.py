"""One training pass of an EAGLE-3 head: steps unrolled on the head's own states, one loss (test-time training).

Dimension key: B batch, S sequence, A anchors, K unrolled steps, M supervised slots of the whole batch, R draft vocabulary,
H hidden size of the head, k tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from jetflow.heads.eagle_config import EagleHeadConfig
from jetflow.heads.eagle_head import EagleHead
from jetflow.losses import exponential_position_weights
from jetflow.losses.divergences import IGNORED_LABEL
from jetflow.protocols import Loss
from jetflow.training.anchors import sample_anchors, supervised_slots
from jetflow.training.step import Batch, StepOutput, TeacherStates, slot_metrics

if TYPE_CHECKING:
    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.targets import Target
    from jetflow.training.settings import TrainSettings
    from jetflow.training.step import StepSettings


class UnrollSettings(NamedTuple):
    """How a step of an EAGLE-3 head compares draft and target; `StepSettings` for such heads.

    Attributes:
        loss: compares the laws in each slot, such as `ForwardKL()`.
        num_unroll: K, steps per anchor; the first reads the target's states, the others the head's own.
        decay_rate: steps after which a step's weight has fallen by e; 0 weights all steps alike.
        chunk_size: slots whose logits exist at a time.
    """

    loss: Loss
    num_unroll: int = 7
    decay_rate: float = 0.0
    chunk_size: int = 4096


def new_eagle_head(
    target: Target,
    *,
    draft_tokens: Tensor | None = None,
    taps: Sequence[int] | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> EagleHead:
    """Returns an untrained float32 head for a target, whose output embedding and final norm begin as the target's.

    Args:
        target: the frozen model to draft for.
        draft_tokens: int64 [R], rising, the tokens that the head can draft; all when absent.
        taps: tapped layers; `default_eagle_taps` when absent.
        fc_norm: norm each tapped state (EAGLE-3.1).
        norm_output: feed final-normed states to the next step (EAGLE-3.1).

    Raises:
        ValueError: a tap is outside the target, or the target has too few layers for the default ones.
    """
    config = EagleHeadConfig.for_target(
        target.config,
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        taps=taps,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    config.taps_in(target.num_layers)
    head = EagleHead(config, draft_tokens).to(target.device)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.output_rows(slice(None) if draft_tokens is None else draft_tokens)[0])
        norm: Any = getattr(target.decoder, "norm", None)
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
    return head


def check_kind(head: BlockDraftHead | EagleHead, settings: TrainSettings, step_settings: StepSettings | UnrollSettings) -> None:
    """Raises ValueError for settings of the other kind of head; one small layer is neither sharded nor recomputed."""
    eagle = isinstance(head, EagleHead)
    if eagle != isinstance(step_settings, UnrollSettings):
        wanted = "UnrollSettings" if eagle else "StepSettings"
        raise ValueError(f"step_settings of a {type(head).__name__} must be {wanted}, got {type(step_settings).__name__}")
    for name in ("shard_head", "activation_checkpointing"):
        if eagle and getattr(settings, name):
            raise ValueError(f"{name} must be False for an EAGLE-3 head, got True")


def eagle_loss(
    head: EagleHead,
    target: Target,
    batch: Batch,
    *,
    loss: Loss,
    num_unroll: int = 7,
    num_anchors: int | None = None,
    decay_rate: float = 0.0,
    generator: torch.Generator | None = None,
) -> StepOutput:
    """Draws anchors and computes the loss of the steps that are unrolled from them.

    Gradients reach the head's parameters only; the target's never get any.

    Args:
        head: the head to train.
        target: the frozen model it drafts for.
        batch: sequences and their loss masks.
        loss: compares draft and target laws in each slot, such as `ForwardKL()`.
        num_unroll: see `UnrollSettings`.
        num_anchors: A, anchors drawn per sequence; all possible ones when absent.
        decay_rate: see `UnrollSettings`.
        generator: source of the anchors' randomness.

    Returns:
        The loss and its metrics, where depth d is step d.

    Raises:
        ValueError: the batch has wrong shapes or dtypes, a count is below 1, or `decay_rate` is negative.

    Example:
        >>> out = eagle_loss(head, target, batch, loss=ForwardKL())  # doctest: +SKIP
        >>> out.loss.backward()  # doctest: +SKIP
    """
    count = batch.loss_mask.shape[1] if num_anchors is None else num_anchors
    anchors, valid = sample_anchors(batch.loss_mask, count, generator)
    # Columns that no row needs only cost time.
    width = max(1, int(valid.sum(dim=1).max()))
    anchors, valid = anchors[:, :width], valid[:, :width]
    settings = UnrollSettings(loss, num_unroll, decay_rate)
    return unrolled_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings)


def unrolled_loss(
    head: EagleHead,
    target: Target,
    batch: Batch,
    *,
    anchors: Tensor,
    valid: Tensor,
    settings: UnrollSettings,
    states: TeacherStates | None = None,
) -> StepOutput:
    """Computes the loss of the steps unrolled from given anchors; `eagle_loss` with the choice of anchors left to the caller.

    An anchor is the root of a draft: step j reads the token at anchor + j - 1 and is taught the target's law of the token at
    anchor + j, restricted to the head's draft vocabulary. A slot whose true token the head cannot draft has weight 0 in the
    loss and counts as a miss in the metrics. The first token of a document is no anchor, as nothing stands before it.

    Args:
        head: the head to train, or a wrapper of it that has its `config`.
        target: the frozen model it drafts for.
        batch: sequences and their loss masks.
        anchors: int64 [B, A], positions in [0, S).
        valid: bool [B, A]; other anchors do not count.
        settings: loss, number of steps and how they are computed.
        states: the target's states for this batch; computed when absent.

    Raises:
        ValueError: as for `eagle_loss`, or `chunk_size` is below 1.
    """
    loss, num_unroll, decay_rate, chunk_size = settings
    for name, value in (("num_unroll", num_unroll), ("chunk_size", chunk_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if getattr(loss, "uses_path", False):
        raise ValueError(
            f"loss must give each slot its own value for an EAGLE-3 head, got {type(loss).__name__}, which reads blocks"
        )
    if batch.token_ids.shape != batch.loss_mask.shape or batch.token_ids.shape[1] < 2:
        raise ValueError(
            f"token_ids and loss_mask must have one shape [B, S] with S of 2 or more, got {tuple(batch.token_ids.shape)} and "
            f"{tuple(batch.loss_mask.shape)}"
        )
    weight_of_step = exponential_position_weights(num_unroll + 1, decay_rate).to(anchors.device)
    starts = _document_starts(batch)
    valid = valid & ~starts.gather(1, anchors)
    slots = supervised_slots(batch.loss_mask & ~starts, anchors, valid=valid, block_size=num_unroll + 1)
    if states is None:
        taps = head.config.taps_in(target.num_layers)
        states = TeacherStates(*target.features(batch.token_ids, taps, batch.document_ids))
    bare: EagleHead = getattr(head, "module", head)
    hidden = _unroll(head, bare, target, batch, anchors, num_unroll, states)

    rows, columns, steps = slots.nonzero(as_tuple=True)
    places = anchors[rows, columns] + steps
    labels = _draft_labels(bare, batch.token_ids[rows, places + 1])
    weights = weight_of_step[steps] * (labels != IGNORED_LABEL)
    total, statistics = _sum_of_slots(
        bare, target, hidden[rows, columns, steps], states.final[rows, places], labels, weights, loss, chunk_size
    )
    weight_sum = weights.sum()
    return StepOutput(
        loss=total / torch.where(weight_sum > 0, weight_sum, 1.0),
        weight_sum=weight_sum,
        **slot_metrics(statistics, slots, valid),
    )


def _unroll(
    head: EagleHead, bare: EagleHead, target: Target, batch: Batch, anchors: Tensor, num_unroll: int, states: TeacherStates
) -> Tensor:
    """The head's final-normed states of all steps, [B, A, K, H].

    A position's input is the token behind it, so that the head's context ends one place before the last token, and an
    anchor's first step stands one place before it.
    """
    length = batch.token_ids.shape[1]
    dtype = bare.fc.weight.dtype
    embed = bare.embed_tokens if bare.embed_tokens is not None else target.embed
    later = anchors[:, :, None] + torch.arange(1, num_unroll, device=anchors.device)
    path_ids = batch.token_ids.gather(1, later.clamp(max=length - 1).flatten(1)).view_as(later)
    with torch.set_grad_enabled(torch.is_grad_enabled() and bare.embed_tokens is not None):
        embeds, path_embeds = embed(batch.token_ids[:, 1:]).to(dtype), embed(path_ids).to(dtype)
    order = torch.arange(length - 1, device=anchors.device)
    mask = (order[:, None] >= order).expand(len(anchors), 1, -1, -1)
    if batch.document_ids is not None:
        documents = batch.document_ids[:, :-1]
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return head(embeds, states.features[:, :-1].to(dtype), mask, (anchors - 1).clamp(min=0), path_embeds)


def _sum_of_slots(
    head: EagleHead,
    target: Target,
    hidden: Tensor,
    final: Tensor,
    labels: Tensor,
    weights: Tensor,
    loss: Loss,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Sums the weighted losses of M slots, a chunk at a time; also returns hit and label probability of each, [M, 2]."""
    uses_target = getattr(loss, "uses_target", True)
    teacher = target.output_rows(slice(None) if head.draft_tokens is None else head.draft_tokens) if uses_target else None

    def one_chunk(part: Tensor, of: slice) -> tuple[Tensor, Tensor]:
        draft_logits = head.lm_head(part)
        target_logits = None
        if teacher is not None:
            with torch.no_grad():
                target_logits = linear(final[of].to(teacher[0].dtype), *teacher)
        values = loss(draft_logits, target_logits, labels[of])
        with torch.no_grad():
            known = labels[of] != IGNORED_LABEL
            picked = draft_logits.gather(-1, labels[of, None].clamp(min=0))[:, 0].float()
            probs = (picked - draft_logits.float().logsumexp(-1)).exp() * known
            hits = (draft_logits.argmax(-1) == labels[of]).float()
        return (values * weights[of]).sum(), torch.stack([hits, probs], dim=-1)

    chunks = [slice(start, start + chunk_size) for start in range(0, len(hidden), chunk_size)]
    # With several chunks the backward pass computes each one's logits anew instead of keeping all.
    found = [
        checkpoint(one_chunk, hidden[of], of, use_reentrant=False) if len(chunks) > 1 else one_chunk(hidden[of], of)
        for of in chunks
    ]
    if not found:
        # Nothing is supervised: a zero with a zero gradient for every weight that takes part.
        return 0.0 * (hidden.sum() + head.lm_head.weight.sum()), hidden.new_zeros(0, 2, dtype=torch.float32)
    return torch.stack([value for value, _ in found]).sum(), torch.cat([statistics for _, statistics in found])


def _document_starts(batch: Batch) -> Tensor:
    """bool [B, S], the first token of each document."""
    starts = torch.zeros_like(batch.loss_mask)
    starts[:, 0] = True
    if batch.document_ids is not None:
        starts[:, 1:] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    return starts


def _draft_labels(head: EagleHead, labels: Tensor) -> Tensor:
    """Turns token ids [M] into columns of the head's logits; -100 for tokens that it cannot draft."""
    if head.draft_tokens is None:
        return labels
    column = torch.searchsorted(head.draft_tokens, labels).clamp(max=len(head.draft_tokens) - 1)
    return torch.where(head.draft_tokens[column] == labels, column, IGNORED_LABEL)
