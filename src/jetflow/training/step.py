"""One training pass of a block draft head: many packed anchors per sequence, one loss.

Dimension key: B batch, S sequence, A anchors, T block size, D slots after the anchor (T - 1), M supervised slots of the
whole batch, V vocabulary, H hidden size of the head, k tapped layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from jetflow import masks
from jetflow.losses import exponential_position_weights, weighted_mean
from jetflow.losses.divergences import IGNORED_LABEL
from jetflow.protocols import Loss
from jetflow.training.anchors import sample_anchors, supervised_slots
from jetflow.training.blocks import (
    MaskForm,
    attention_masks,
    block_tokens,
    predicting_slots,
    previous_embeds,
    slot_places,
    visible_prefixes,
)
from jetflow.training.chunked import chunked_sum
from jetflow.training.vocabulary import FrozenLMHead, SampledVocabulary

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.targets import Target


class Batch(NamedTuple):
    """Token sequences to train on, padded at the end.

    Attributes:
        token_ids: int64 [B, S]; padding may hold any id of the vocabulary.
        loss_mask: bool [B, S]; True where the token is part of an answer, so that the head learns to predict it. The first
            token of a document counts as False.
        document_ids: int64 [B, S], equal within a document, for rows that hold several; None for one document per row.
    """

    token_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor | None = None


class TeacherStates(NamedTuple):
    """What the frozen target knows about a batch.

    Attributes:
        features: float [B, S, k * H], tapped states.
        final: float [B, S, H], final-normed hidden states, whose `lm_head` gives the target's logits.
    """

    features: Tensor
    final: Tensor


class StepOutput(NamedTuple):
    """Loss and metrics of one pass. Everything but `loss` is detached.

    The metrics are about blocks whose tokens are all masked; a head with refinement learns from filled ones, too.

    To accumulate over micro-batches without a mean of means, call `(out.loss * out.weight_sum).backward()` for each,
    then divide the gradients by the sum of all `weight_sum`.

    Attributes:
        loss: float32 scalar, the weighted mean over supervised slots; 0 where there are none.
        weight_sum: float32 scalar, sum of the weights behind `loss`.
        accuracy_by_depth: float32 [D], share of the supervised slots at each depth whose draft argmax is the label;
            0 for a depth without slots.
        num_slots_by_depth: int64 [D], supervised slots at each depth.
        expected_acceptance_length: float32 scalar, mean over these anchors of `1 + sum_d prod_{j <= d} q_j(label_j)`,
            where q_j is the draft's law in slot j and the sum ends with the anchor's supervised slots. It is the
            acceptance length to expect of a chain that is sampled from the draft when the target would write the
            labels; 0 without valid anchors.
        num_anchors: int64 scalar, valid anchors of these blocks.
    """

    loss: Tensor
    weight_sum: Tensor
    accuracy_by_depth: Tensor
    num_slots_by_depth: Tensor
    expected_acceptance_length: Tensor
    num_anchors: Tensor


class StepSettings(NamedTuple):
    """How a step compares draft and target.

    Attributes:
        loss: compares the laws in each slot, such as `ForwardKL()`. One whose attribute `uses_target` is False, such as
            `CrossEntropy()`, spares the target's output embedding; one with `uses_path` is given whole blocks.
        decay_rate: slots after which a slot's weight has fallen by e; 0 weights all slots alike.
        mask_form: how the attention mask is stored: `masks.dense`, or `masks.block_mask` for FlexAttention on a GPU.
        chunk_size: slots whose logits exist at a time; whole blocks for a loss with `uses_path`.
        vocabulary: compares over a sample of the vocabulary; over all of it when absent.
        marginal_share: share of the masked blocks that a head with a correction learns without it, so that its plain laws,
            which choose the candidates of each depth, stay good laws.
        filled_share: share of the blocks that show true tokens to a head with refinement; see `visible_prefixes`.
    """

    loss: Loss
    decay_rate: float = 0.0
    mask_form: MaskForm = masks.dense
    chunk_size: int = 1024
    vocabulary: SampledVocabulary | None = None
    marginal_share: float = 0.25
    filled_share: float = 0.5


def draft_loss(
    head: BlockDraftHead,
    target: Target,
    batch: Batch,
    *,
    loss: Loss,
    num_anchors: int,
    decay_rate: float = 0.0,
    generator: torch.Generator | None = None,
    mask_form: MaskForm = masks.dense,
) -> StepOutput:
    """Draws anchors and computes the loss of the blocks that hang off them.

    Gradients reach the head's parameters only; the target's never get any.

    Args:
        head: the head to train.
        target: the frozen model it drafts for.
        batch: sequences and their loss masks.
        loss: compares draft and target laws in each slot, such as `ForwardKL()`.
        num_anchors: A, anchors drawn per sequence (all possible ones where a sequence has fewer).
        decay_rate: see `StepSettings`.
        generator: source of randomness.
        mask_form: see `StepSettings`.

    Returns:
        The loss and its metrics.

    Raises:
        ValueError: the batch has wrong shapes or dtypes, `num_anchors` is below 1 or `decay_rate` is negative.

    Example:
        >>> out = draft_loss(head, target, batch, loss=ForwardKL(), num_anchors=8)  # doctest: +SKIP
        >>> out.loss.backward()  # doctest: +SKIP
    """
    anchors, valid = sample_anchors(batch.loss_mask, num_anchors, generator)
    settings = StepSettings(loss, decay_rate, mask_form)
    return block_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings, generator=generator)


def block_loss(
    head: BlockDraftHead,
    target: Target,
    batch: Batch,
    *,
    anchors: Tensor,
    valid: Tensor,
    settings: StepSettings,
    states: TeacherStates | None = None,
    generator: torch.Generator | None = None,
) -> StepOutput:
    """Computes the loss of the blocks at given anchors; `draft_loss` with the choice of anchors left to the caller.

    The slot that predicts the token at a + i in the block at anchor a, slot i where it is masked, is taught the target's
    law at position a + i - 1. Tokens beyond the supervised span that follows the anchor do not count.

    Args:
        head: the head to train, or a wrapper of it that has its `config`.
        target: the frozen model it drafts for.
        batch: sequences and their loss masks.
        anchors: int64 [B, A], positions in [0, S).
        valid: bool [B, A]; other anchors do not count.
        settings: loss, weights and how they are computed.
        states: the target's states for this batch; computed when absent.
        generator: draws which blocks show tokens and the sample of the vocabulary; on the CPU.

    Returns:
        The loss and its metrics.

    Raises:
        ValueError: the batch has wrong shapes or dtypes, `decay_rate` is negative, a share is not in [0, 1], or a loss that
            ranks paths is given a sample of the vocabulary.
    """
    by_block = getattr(settings.loss, "uses_path", False)
    _check(batch, settings, by_block)
    block_size = head.config.block_size
    slot_weights = exponential_position_weights(block_size, settings.decay_rate).to(anchors.device)
    slots = supervised_slots(batch.loss_mask, anchors, valid=valid, block_size=block_size)
    rows, blocks, depths = slot_places(slots, by_block)
    counted = slots[rows, blocks, depths]
    label_positions = (anchors[rows, blocks] + depths + 1).clamp(max=batch.token_ids.shape[1] - 1)
    labels = batch.token_ids[rows, label_positions].masked_fill(~counted, IGNORED_LABEL)
    if states is None:
        states = TeacherStates(*target.features(batch.token_ids, head.config.taps, batch.document_ids))

    visible = anchors.new_zeros(anchors.shape[1])
    if head.config.refinement:
        drawn = visible_prefixes(anchors.shape[1], block_size, settings.filled_share, generator)
        visible = drawn.to(anchors.device)
    hidden = _run_head(head, target, batch, anchors, visible, settings=settings, features=states.features)
    sample = settings.vocabulary.sample(labels, generator) if settings.vocabulary else None
    lm_head = FrozenLMHead(target, sample)
    picked = sample.index_of(labels) if sample else labels
    weights = slot_weights[depths] * counted
    uses_target = getattr(settings.loss, "uses_target", True)

    def loss_of_chunk(part: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        draft_logits = lm_head(part)
        target_logits = None
        if uses_target:
            with torch.no_grad():
                target_logits = lm_head(states.final[rows[places], label_positions[places] - 1])
        values = settings.loss(draft_logits, target_logits, picked[places])
        with torch.no_grad():
            hits = draft_logits.argmax(-1) == picked[places]
            label_logits = draft_logits.gather(-1, picked[places].clamp(min=0)[..., None])[..., 0].float()
            probs = (label_logits - draft_logits.float().logsumexp(-1)).exp()
        return (values * weights[places]).sum(), torch.stack([hits.float(), probs], dim=-1)

    predicting = hidden[rows, blocks, predicting_slots(blocks, depths, visible)]
    chunk_size = max(1, settings.chunk_size // (block_size - 1)) if by_block else settings.chunk_size
    total, statistics = chunked_sum(predicting, loss_of_chunk, chunk_size)
    weight_sum = weights.sum()
    masked = visible == 0
    return StepOutput(
        loss=total / torch.where(weight_sum > 0, weight_sum, 1.0),
        weight_sum=weight_sum,
        **slot_metrics(statistics[counted & masked[blocks]], slots & masked[:, None], valid & masked),
    )


def _check(batch: Batch, settings: StepSettings, by_block: bool) -> None:
    if not 0 <= settings.marginal_share <= 1:
        raise ValueError(f"marginal_share must be in [0, 1], got {settings.marginal_share}")
    if batch.token_ids.shape != batch.loss_mask.shape:
        raise ValueError(
            f"loss_mask must have the shape of token_ids, {tuple(batch.token_ids.shape)}, got {tuple(batch.loss_mask.shape)}"
        )
    if by_block and settings.vocabulary is not None:
        raise ValueError("vocabulary must be absent with a loss that ranks paths: a sample's tokens stand for many others")


def _run_head(
    head: BlockDraftHead,
    target: Target,
    batch: Batch,
    anchors: Tensor,
    visible: Tensor,
    *,
    settings: StepSettings,
    features: Tensor,
) -> Tensor:
    """Hidden states [B, A, T, H] of all slots, corrected where they learn a correction."""
    dtype, block_size = next(head.parameters()).dtype, head.config.block_size
    with torch.no_grad():
        block_embeds = target.embed(block_tokens(batch.token_ids, anchors, visible, head.config).flatten(1))
    positions = (anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)).flatten(1)
    options: dict[str, Tensor | BlockMask] = attention_masks(
        head.config, anchors, batch.token_ids.shape[1], batch.document_ids, settings.mask_form
    )
    if head.config.correction is not None:
        share = settings.marginal_share
        embeds = previous_embeds(
            target, batch.token_ids, anchors, visible,
            block_size=block_size, marginal_share=share, correct_filled=head.config.corrects_filled,
        )  # fmt: skip
        options["previous_embeds"] = embeds.to(dtype)
    hidden = head(block_embeds.to(dtype), features.to(dtype), positions, **options)
    return hidden.unflatten(1, (-1, block_size))


def slot_metrics(statistics: Tensor, slots: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Accuracy by depth and expected acceptance length, from hit and label probability of each supervised slot [M, 2]."""
    rows, blocks, depths = slots.nonzero(as_tuple=True)
    num_slots_by_depth = slots.sum(dim=(0, 1))
    hits = torch.zeros(slots.shape[2], device=statistics.device).index_add(0, depths, statistics[:, 0])
    path_probs = slots.float().index_put((rows, blocks, depths), statistics[:, 1]).cumprod(-1)
    return {
        "accuracy_by_depth": hits / num_slots_by_depth.clamp(min=1),
        "num_slots_by_depth": num_slots_by_depth,
        "expected_acceptance_length": weighted_mean(1 + path_probs.sum(-1), valid.float()),
        "num_anchors": valid.sum(),
    }
