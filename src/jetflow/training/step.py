"""One training pass of a block draft head: many packed anchors per sequence, one loss.

Dimension key: B batch, S sequence, A anchors, T block size, D slots after the anchor (T - 1), M supervised slots of the
whole batch, V vocabulary, H hidden size of the head, k tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from jetflow import masks
from jetflow.losses import exponential_position_weights, weighted_mean
from jetflow.protocols import Loss
from jetflow.training.anchors import sample_anchors, supervised_slots

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.heads.config import DraftHeadConfig
    from jetflow.targets import Target

MaskForm = Callable[..., "Tensor | BlockMask"]


class Batch(NamedTuple):
    """Token sequences to train on, one document per row, padded at the end.

    Attributes:
        token_ids: int64 [B, S]; padding may hold any id of the vocabulary.
        loss_mask: bool [B, S]; True where the token is part of an answer, so that the head learns to predict it.
    """

    token_ids: Tensor
    loss_mask: Tensor


class StepOutput(NamedTuple):
    """Loss and metrics of one pass. Everything but `loss` is detached.

    To accumulate over micro-batches without a mean of means, call `(out.loss * out.weight_sum).backward()` for each,
    then divide the gradients by the sum of all `weight_sum`.

    Attributes:
        loss: float32 scalar, the weighted mean over supervised slots; 0 where there are none.
        weight_sum: float32 scalar, sum of the weights behind `loss`.
        accuracy_by_depth: float32 [D], share of the supervised slots at each depth whose draft argmax is the label;
            0 for a depth without slots.
        num_slots_by_depth: int64 [D], supervised slots at each depth.
        expected_acceptance_length: float32 scalar, mean over valid anchors of `1 + sum_d prod_{j <= d} q_j(label_j)`,
            where q_j is the draft's law in slot j and the sum ends with the anchor's supervised slots. It is the
            acceptance length to expect of a chain that is sampled from the draft when the target would write the
            labels; 0 without valid anchors.
        num_anchors: int64 scalar, valid anchors.
    """

    loss: Tensor
    weight_sum: Tensor
    accuracy_by_depth: Tensor
    num_slots_by_depth: Tensor
    expected_acceptance_length: Tensor
    num_anchors: Tensor


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
        decay_rate: slots after which a slot's weight has fallen by e; 0 weights all slots alike.
        generator: source of the anchors' randomness.
        mask_form: how the attention mask is stored: `masks.dense`, or `masks.block_mask` for FlexAttention on a GPU.

    Returns:
        The loss and its metrics.

    Raises:
        ValueError: the batch has wrong shapes or dtypes, `num_anchors` is below 1 or `decay_rate` is negative.

    Example:
        >>> out = draft_loss(head, target, batch, loss=ForwardKL(), num_anchors=8)  # doctest: +SKIP
        >>> out.loss.backward()  # doctest: +SKIP
    """
    anchors, valid = sample_anchors(batch.loss_mask, num_anchors, generator)
    return block_loss(head, target, batch, anchors=anchors, valid=valid, loss=loss, decay_rate=decay_rate, mask_form=mask_form)


def block_loss(
    head: BlockDraftHead,
    target: Target,
    batch: Batch,
    *,
    anchors: Tensor,
    valid: Tensor,
    loss: Loss,
    decay_rate: float = 0.0,
    mask_form: MaskForm = masks.dense,
) -> StepOutput:
    """Computes the loss of the blocks at given anchors; `draft_loss` with the choice of anchors left to the caller.

    Slot i of the block at anchor a is taught the target's law at position a + i - 1, that of the token at a + i. Slots
    beyond the supervised span that follows the anchor do not count.

    Args:
        head: the head to train.
        target: the frozen model it drafts for.
        batch: sequences and their loss masks.
        anchors: int64 [B, A], positions in [0, S).
        valid: bool [B, A]; other anchors do not count.
        loss: compares draft and target laws in each slot.
        decay_rate: slots after which a slot's weight has fallen by e; 0 weights all slots alike.
        mask_form: how the attention mask is stored: `masks.dense`, or `masks.block_mask` for FlexAttention on a GPU.

    Returns:
        The loss and its metrics.

    Raises:
        ValueError: the batch has wrong shapes or dtypes, or `decay_rate` is negative.
    """
    if batch.token_ids.shape != batch.loss_mask.shape:
        raise ValueError(
            f"loss_mask must have the shape of token_ids, {tuple(batch.token_ids.shape)}, got {tuple(batch.loss_mask.shape)}"
        )
    block_size = head.config.block_size
    slot_weights = exponential_position_weights(block_size, decay_rate).to(anchors.device)
    slots = supervised_slots(batch.loss_mask, anchors, valid=valid, block_size=block_size)
    rows, blocks, depths = slots.nonzero(as_tuple=True)
    label_positions = anchors[rows, blocks] + depths + 1
    labels = batch.token_ids[rows, label_positions]

    features, target_logits = target.features(batch.token_ids, head.config.taps)
    block_embeds, positions, mask = _packed_blocks(head.config, target, batch.token_ids, anchors, mask_form)
    dtype = head.fc.weight.dtype
    hidden = head(block_embeds.to(dtype), features.to(dtype), positions, mask).unflatten(1, (-1, block_size))
    draft_logits = _frozen_lm_head(target, hidden[rows, blocks, depths + 1])
    values = loss(draft_logits, target_logits[rows, label_positions - 1], labels)
    weights = slot_weights[depths]

    with torch.no_grad():
        hits = (draft_logits.argmax(-1) == labels).float()
        label_probs = draft_logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).exp()
        num_slots_by_depth = slots.sum(dim=(0, 1))
        hits_by_depth = torch.zeros(block_size - 1, device=hits.device).index_add(0, depths, hits)
        path_probs = slots.float().index_put((rows, blocks, depths), label_probs).cumprod(-1)
        lengths = 1 + path_probs.sum(-1)
    return StepOutput(
        loss=weighted_mean(values, weights),
        weight_sum=weights.sum(),
        accuracy_by_depth=hits_by_depth / num_slots_by_depth.clamp(min=1),
        num_slots_by_depth=num_slots_by_depth,
        expected_acceptance_length=weighted_mean(lengths, valid.float()),
        num_anchors=valid.sum(),
    )


def _packed_blocks(
    config: DraftHeadConfig, target: Target, token_ids: Tensor, anchors: Tensor, mask_form: MaskForm
) -> tuple[Tensor, Tensor, Tensor | BlockMask]:
    """Lays out blocks `[token at anchor, MASK, ...]`: embeddings [B, A * T, H], positions [B, A * T] and the mask."""
    batch, length = token_ids.shape
    num_anchors, size = anchors.shape[1], config.block_size
    block_ids = token_ids.new_full((batch, num_anchors, size), config.mask_token_id)
    block_ids[:, :, 0] = token_ids.gather(1, anchors)
    with torch.no_grad():
        block_embeds = target.embed(block_ids.flatten(1))
    positions = (anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)).flatten(1)
    rule = masks.anchor_blocks(anchors, size, length, config.causal)
    queries = num_anchors * size
    return block_embeds, positions, mask_form(rule, batch, 1, queries, length + queries, device=anchors.device)


def _frozen_lm_head(target: Target, hidden: Tensor) -> Tensor:
    """The target's output embedding as a constant: gradients reach `hidden` [M, H] but no parameter of the target."""
    module = target.model.get_output_embeddings()
    constants = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return functional_call(module, constants, (hidden.to(target.dtype),))
