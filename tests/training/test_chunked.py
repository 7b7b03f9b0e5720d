"""Losses in chunks of slots, and over samples of the vocabulary."""

import pytest
import torch
from small_run import VOCAB, small_target
from small_step import BLOCK, TAPS, all_anchors, make_batch, make_head

from jetflow.losses import CrossEntropy, ForwardKL, ReverseKL
from jetflow.training import StepSettings, block_loss, supervised_slots
from jetflow.training.vocabulary import SampledVocabulary

# Sums of a few hundred float32 terms in another order.
ATOL = 1e-6


@pytest.fixture(scope="module")
def target():
    return small_target(num_layers=3)


@pytest.mark.parametrize("loss", [CrossEntropy(), ForwardKL(), ReverseKL()], ids=["ce", "forward", "reverse"])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunks_change_neither_loss_nor_gradients_nor_metrics(target, loss, chunk_size):
    head, batch = make_head(target, causal=True), make_batch(14, 9)
    anchors, valid = all_anchors(batch)
    outputs, grads = [], []
    for size in (10_000, chunk_size):
        head.zero_grad()
        settings = StepSettings(loss, 3.0, chunk_size=size)
        out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings)
        out.loss.backward()
        outputs.append(out)
        grads.append([parameter.grad.clone() for parameter in head.parameters()])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=1e-5)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=1e-4)


def test_chunked_gradient_is_that_of_plain_autograd(target):
    head, batch = make_head(target, causal=True), make_batch(14, 9)
    anchors, valid = all_anchors(batch)
    seen = []
    hook = head.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(ForwardKL(), chunk_size=5))
    hook.remove()
    (chunked,) = torch.autograd.grad(out.loss, seen[0], retain_graph=True)
    hidden = seen[0].detach().unflatten(1, (-1, BLOCK)).requires_grad_()
    slots = supervised_slots(batch.loss_mask, anchors, valid=valid, block_size=BLOCK)
    rows, blocks, depths = slots.nonzero(as_tuple=True)
    places = anchors[rows, blocks] + depths
    _, final = target.features(batch.token_ids, TAPS)
    values = ForwardKL()(
        target.lm_head(hidden[rows, blocks, depths + 1]), target.lm_head(final)[rows, places], batch.token_ids[rows, places + 1]
    )
    (plain,) = torch.autograd.grad(values.mean(), hidden)
    torch.testing.assert_close(chunked, plain.flatten(1, 2), atol=ATOL, rtol=1e-4)


def test_sample_of_everything_is_the_whole_vocabulary_and_a_part_estimates_it(target):
    head, batch = make_head(target, causal=True), make_batch(14, 9)
    anchors, valid = all_anchors(batch)

    def loss_with(vocabulary, seed=0):
        settings = StepSettings(CrossEntropy(), vocabulary=vocabulary)
        generator = torch.Generator().manual_seed(seed)
        return block_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings, generator=generator).loss.item()

    whole = loss_with(None)
    assert loss_with(SampledVocabulary(torch.arange(5), VOCAB, num_random=VOCAB)) == pytest.approx(whole, rel=1e-5)
    few = SampledVocabulary(torch.arange(5), VOCAB, num_random=8)
    mean = sum(loss_with(few, seed) for seed in range(40)) / 40
    assert mean == pytest.approx(whole, rel=0.05)
    assert len({loss_with(few, seed) for seed in range(5)}) > 1
