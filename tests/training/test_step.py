"""The packed training step: what each slot is taught, who gets gradients, what a block may see, and accumulation."""

from types import SimpleNamespace

import pytest
import torch
from small_run import VOCAB, small_target
from small_step import BLOCK, TAPS, all_anchors, make_batch, make_head
from torch import nn
from transformers import Qwen3ForCausalLM

from jetflow import masks
from jetflow.heads.window import WindowedLayers
from jetflow.losses import CrossEntropy, ForwardKL, ReverseKL
from jetflow.targets import Target
from jetflow.training import Batch, StepSettings, TeacherStates, block_loss, draft_loss, sample_anchors

# Sums of a few hundred float32 terms in another order.
ATOL = 1e-6


@pytest.fixture(scope="module")
def target():
    return small_target(num_layers=3)


# A window of the block's own size, in one layer of two and causal where the other is not.
WINDOW = WindowedLayers(BLOCK, (0,))


@pytest.fixture(params=[(True, None), (False, None), (False, WINDOW)], ids=["causal", "bidirectional", "windowed"])
def head(request, target):
    torch.manual_seed(1)
    causal, window = request.param
    return make_head(target, causal=causal, window=window)


class PerfectHead(nn.Module):
    """Knows the text: its hidden state at position p is the one-hot of the token `offset` places after p."""

    def __init__(self, token_ids, offset=0):
        super().__init__()
        self.config = SimpleNamespace(
            block_size=BLOCK, taps=TAPS, mask_token_id=VOCAB - 1, causal=True, window=None, correction=None, refinement=False
        )
        self.fc = nn.Linear(1, 1)
        self.token_ids, self.offset = token_ids, offset

    def forward(self, block_embeds, features, block_positions, mask):
        places = (block_positions + self.offset).clamp(max=self.token_ids.shape[1] - 1)
        return 60.0 * nn.functional.one_hot(self.token_ids.gather(1, places), VOCAB).float()


class CertainTarget:
    """Its logits at position p are certain of the token at p + 1; logits are hidden states as they are."""

    def __init__(self, token_ids):
        self.dtype = torch.float32
        following = token_ids.roll(-1, 1)
        self.logits = 60.0 * nn.functional.one_hot(following, VOCAB).float()

    def embed(self, ids):
        return torch.zeros(*ids.shape, 16)

    def output_rows(self, token_ids):
        return torch.eye(VOCAB)[token_ids], None

    def features(self, token_ids, taps, document_ids=None):
        return torch.zeros(*token_ids.shape, 48), self.logits


@pytest.mark.parametrize("loss", [CrossEntropy(), ForwardKL(), ReverseKL()], ids=["ce", "forward", "reverse"])
def test_perfect_head_is_right_at_every_depth(loss):
    batch = make_batch(14, 9)
    head, target = PerfectHead(batch.token_ids), CertainTarget(batch.token_ids)
    out = draft_loss(head, target, batch, loss=loss, num_anchors=6)
    assert out.accuracy_by_depth.tolist() == [1.0] * (BLOCK - 1)
    assert out.loss.item() == pytest.approx(0.0, abs=1e-6)
    for offset in (-1, 1):
        shifted = draft_loss(PerfectHead(batch.token_ids, offset), target, batch, loss=loss, num_anchors=6)
        assert shifted.accuracy_by_depth.max() < 0.5
        assert shifted.loss > 10


def test_metrics_count_each_depth_and_end_with_the_span():
    # Supervised: positions 3 to 6. Anchors 2, 3, 4, 5 have 4, 3, 2, 1 slots.
    batch = make_batch(7, width=12)
    head, target = PerfectHead(batch.token_ids), CertainTarget(batch.token_ids)
    anchors, valid = all_anchors(batch)
    out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(CrossEntropy()))
    assert out.num_slots_by_depth.tolist() == [4, 3, 2, 1]
    assert out.num_anchors.item() == 4
    assert out.weight_sum.item() == 10
    assert out.expected_acceptance_length.item() == pytest.approx(1 + (4 + 3 + 2 + 1) / 4, rel=1e-5)


def test_loss_equals_blocks_taken_one_by_one(head, target):
    batch = make_batch(11, 8)
    anchors, valid = sample_anchors(batch.loss_mask, 4, torch.Generator().manual_seed(2))
    loss, decay_rate = ForwardKL(2.0), 3.0
    out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(loss, decay_rate))
    total, weight_sum = 0.0, 0.0
    for b, row in enumerate(batch.token_ids):
        features, final = target.features(row[None], TAPS)
        logits = target.lm_head(final)
        for anchor in anchors[b][valid[b]].tolist():
            # As at decode time: a cache that holds what lies before the anchor.
            cache = head.new_cache(1)
            head.extend_context(cache, features[:, :anchor], torch.tensor([anchor]))
            block = torch.full((1, BLOCK), VOCAB - 1)
            block[0, 0] = row[anchor]
            rule = masks.in_block(causal=head.config.causal, block_size=BLOCK, context_len=0)
            hidden = head.draft(target.embed(block), cache, masks.dense(rule, 1, 1, BLOCK, BLOCK)[0, 0])
            for i in range(1, BLOCK):
                if anchor + i >= len(row) or not batch.loss_mask[b, anchor + i]:
                    break
                weight = torch.exp(torch.tensor(-(i - 1) / decay_rate)).item()
                value = loss(target.lm_head(hidden[0, i]), logits[0, anchor + i - 1], row[anchor + i])
                total, weight_sum = total + weight * value.item(), weight_sum + weight
    assert out.loss.item() == pytest.approx(total / weight_sum, rel=1e-5)
    assert out.weight_sum.item() == pytest.approx(weight_sum, rel=1e-5)


def test_gradients_reach_every_head_parameter_and_no_target_parameter(head, target):
    assert all(parameter.requires_grad for parameter in target.model.parameters())
    out = draft_loss(head, target, make_batch(12, 9), loss=ForwardKL(), num_anchors=4)
    out.loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(parameter.requires_grad for parameter in target.model.parameters())


def test_block_sees_no_feature_from_its_anchor_on(head, target):
    batch = make_batch(14)
    anchors, valid = torch.tensor([[4, 6, 9]]), torch.ones(1, 3, dtype=torch.bool)
    features, final = target.features(batch.token_ids, TAPS)
    features.requires_grad_()
    states = TeacherStates(features, final)
    for kept in range(3):
        features.grad = None
        only = valid & (torch.arange(3) == kept)
        block_loss(
            head, target, batch, anchors=anchors, valid=only, settings=StepSettings(ForwardKL()), states=states
        ).loss.backward()
        reacts = (features.grad[0].abs().sum(-1) > 0).tolist()
        anchor = int(anchors[0, kept])
        assert reacts == [position < anchor for position in range(14)]


def test_micro_batches_add_up_to_the_whole_batch(target):
    head = make_head(target, causal=True)
    batch = make_batch(5, 12, 6, 10, width=12)
    anchors, valid = sample_anchors(batch.loss_mask, 4, torch.Generator().manual_seed(0))
    whole = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(ForwardKL(), 4.0))
    whole.loss.backward()
    expected = [parameter.grad.clone() for parameter in head.parameters()]
    for size in (1, 2):
        head.zero_grad()
        losses, weights = torch.tensor(0.0), torch.tensor(0.0)
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            part = Batch(batch.token_ids[rows], batch.loss_mask[rows])
            out = block_loss(
                head, target, part, anchors=anchors[rows], valid=valid[rows], settings=StepSettings(ForwardKL(), 4.0)
            )
            (out.loss * out.weight_sum).backward()
            losses, weights = losses + out.loss.detach() * out.weight_sum, weights + out.weight_sum
        torch.testing.assert_close(losses / weights, whole.loss.detach(), atol=ATOL, rtol=1e-5)
        for parameter, grad in zip(head.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad / weights, grad, atol=ATOL, rtol=1e-4)


def test_padding_changes_nothing(target):
    head = make_head(target, causal=True)
    batch = make_batch(9)
    anchors, valid = all_anchors(batch)
    short = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(ForwardKL()))
    padded = Batch(*(torch.nn.functional.pad(part, (0, 7)) for part in batch[:2]))
    anchors, valid = all_anchors(padded)
    long = block_loss(head, target, padded, anchors=anchors, valid=valid, settings=StepSettings(ForwardKL()))
    torch.testing.assert_close(long.loss, short.loss, atol=ATOL, rtol=1e-5)
    assert torch.equal(long.num_slots_by_depth, short.num_slots_by_depth)


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK, BLOCK + 1])
def test_sequences_about_as_long_as_a_block(target, length):
    head = make_head(target, causal=True)
    out = draft_loss(head, target, make_batch(length, prompt=1), loss=ForwardKL(), num_anchors=8)
    out.loss.backward()
    assert out.num_anchors.item() == length - 1
    assert out.loss.isfinite()


def test_nothing_supervised_gives_zero_loss_and_finite_gradients(target):
    head = make_head(target, causal=True)
    out = draft_loss(head, target, make_batch(3, 3, width=8), loss=ForwardKL(), num_anchors=2)
    out.loss.backward()
    assert out.loss.item() == out.weight_sum.item() == out.num_anchors.item() == 0
    assert out.expected_acceptance_length.item() == 0
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_row_without_answer_leaves_the_other_row_alone(target):
    head = make_head(target, causal=True)
    batch = make_batch(10, 3)
    anchors, valid = all_anchors(batch)
    both = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(ForwardKL()))
    first = Batch(batch.token_ids[:1], batch.loss_mask[:1])
    alone = block_loss(head, target, first, anchors=anchors[:1], valid=valid[:1], settings=StepSettings(ForwardKL()))
    torch.testing.assert_close(both.loss, alone.loss, atol=ATOL, rtol=1e-5)
    assert both.num_anchors == alone.num_anchors


def test_mask_as_block_mask_gives_the_same_loss(head, target):
    batch = make_batch(12, 9)
    anchors, valid = all_anchors(batch)
    given = {"anchors": anchors, "valid": valid}
    # FlexAttention has no backward on a CPU.
    with torch.no_grad():
        dense = block_loss(head, target, batch, **given, settings=StepSettings(ForwardKL())).loss
        settings = StepSettings(ForwardKL(), mask_form=masks.block_mask)
        sparse = block_loss(head, target, batch, **given, settings=settings).loss
    torch.testing.assert_close(sparse, dense, atol=ATOL, rtol=1e-5)


def test_head_in_float32_learns_from_a_bfloat16_target(target):
    half = Target(Qwen3ForCausalLM(target.model.config).to(torch.bfloat16).eval())
    head = make_head(target, causal=True)
    out = draft_loss(head, half, make_batch(9), loss=ForwardKL(), num_anchors=3)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert head.fc.weight.grad.dtype == torch.float32


def test_training_lowers_the_loss(target):
    head = make_head(target, causal=True)
    batch = make_batch(16, 16)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        out = draft_loss(head, target, batch, loss=ForwardKL(), num_anchors=12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_mask_of_another_shape_is_named(target):
    head = make_head(target, causal=True)
    batch = make_batch(9)
    with pytest.raises(ValueError, match=r"loss_mask must have the shape of token_ids, \(1, 9\), got \(1, 8\)"):
        draft_loss(head, target, Batch(batch.token_ids, batch.loss_mask[:, :8]), loss=ForwardKL(), num_anchors=2)


def test_packed_documents_are_taught_as_if_they_stood_alone(target):
    head, lengths = make_head(target, causal=True), (9, 6, 12)
    settings = StepSettings(ForwardKL())
    apart = make_batch(*lengths)
    total, weight = torch.tensor(0.0), torch.tensor(0.0)
    pieces, masks_, anchors = [], [], []
    for row, length in enumerate(lengths):
        one = Batch(apart.token_ids[row : row + 1, :length], apart.loss_mask[row : row + 1, :length])
        own, valid = all_anchors(one)
        out = block_loss(head, target, one, anchors=own, valid=valid, settings=settings)
        total, weight = total + out.loss * out.weight_sum, weight + out.weight_sum
        anchors.append(own[valid] + sum(lengths[:row]))
        pieces.append(one.token_ids[0])
        masks_.append(one.loss_mask[0])
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = Batch(torch.cat(pieces)[None], torch.cat(masks_)[None], ids)
    own = torch.cat(anchors)[None]
    out = block_loss(head, target, packed, anchors=own, valid=torch.ones_like(own, dtype=torch.bool), settings=settings)
    assert out.weight_sum == weight
    torch.testing.assert_close(out.loss, total / weight, atol=1e-5, rtol=1e-5)
