"""The loss of the tree that is served: its threshold and its limit by brute force, its gradient, and what must be monotone."""

import itertools
import math

import pytest
import torch
from conftest import make_model

from jetflow import BestFirst, BlockDraftHead, DraftHeadConfig, MarginalSource, Target
from jetflow.losses import CrossEntropy, ForwardKL, MixedLoss, TreeAcceptance
from jetflow.losses.tree import tree_threshold
from jetflow.training import Batch, StepSettings, block_loss, sample_anchors
from jetflow.training.vocabulary import SampledVocabulary

DEPTH, VOCAB = 3, 4
# Narrow enough that the sigmoid is a step between the scores of these random laws.
STEP = 1e-5


def random_laws(seed, *shape):
    return (2 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).log_softmax(-1)


def all_paths(length):
    return itertools.product(range(VOCAB), repeat=length)


def score(law, path):
    return sum(float(law[depth, token]) for depth, token in enumerate(path))


@pytest.mark.parametrize("budget", [2, 3, 6, 15, 40, 84, 85, 100])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_threshold_lies_between_the_last_node_inside_and_the_first_outside(budget, depth):
    law = random_laws(budget, DEPTH)
    exists = torch.arange(DEPTH) < depth
    scores = sorted((score(law, path) for length in range(1, depth + 1) for path in all_paths(length)), reverse=True)
    threshold = float(tree_threshold(law, exists, budget))
    if budget > len(scores):
        assert threshold < -1e20
    else:
        assert threshold == pytest.approx((scores[budget - 2] + scores[budget - 1]) / 2, abs=1e-9)


def target_law(path):
    """The target's log-law behind a path of tokens: another one behind each."""
    return random_laws(1000 + sum((token + 1) * 7**place for place, token in enumerate(path)))


def target_log_prob(path, temperature):
    laws = [(target_law(path[:depth]) / temperature).log_softmax(-1) for depth in range(len(path))]
    return sum(float(law[token]) for law, token in zip(laws, path, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("budget", [2, 5, 12, 30])
def test_its_mean_over_the_targets_paths_is_what_the_tree_expects(budget, temperature):
    """With a narrow sigmoid: D less the block's sum, averaged over all texts, is the sum of the tree's probabilities."""
    draft = random_laws(budget, DEPTH)
    loss = TreeAcceptance(budget, temperature=temperature, smoothness=STEP)
    mean, greedy_mean = 0.0, 0.0
    for path in all_paths(DEPTH):
        target = torch.stack([target_law(path[:depth]) for depth in range(DEPTH)])
        prob = math.exp(target_log_prob(path, temperature))
        labels = torch.tensor(path)
        mean += prob * float(DEPTH - loss(draft, target, labels).sum())
        # The labels alone have the same mean.
        greedy_mean += prob * float(DEPTH - TreeAcceptance(budget, smoothness=STEP)(draft, None, labels).sum())
    tree = BestFirst()(torch.tensor([0]), MarginalSource.from_logits(draft[None].float(), VOCAB), budget)
    paths = [()]
    for node in range(1, budget):
        paths.append((*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])))
    expected = sum(math.exp(target_log_prob(path, temperature)) for path in paths[1:])
    assert mean == pytest.approx(expected, abs=1e-6)
    assert greedy_mean == pytest.approx(expected, abs=1e-6)


def test_the_laws_after_the_last_token_are_averaged_exactly():
    """At depth 1 nothing is sampled: whatever the label, the value is the probability that the tree misses."""
    draft, target = random_laws(0, DEPTH), random_laws(1, DEPTH)
    values = {
        float(TreeAcceptance(6, temperature=1.0)(draft, target, torch.tensor([token, 0, 0]))[0]) for token in range(VOCAB)
    }
    assert len(values) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [2, 7, 40])
def test_gradient_is_that_of_finite_differences(budget, temperature):
    draft = random_laws(budget, 2, DEPTH).requires_grad_()
    target, labels = random_laws(5, 2, DEPTH), torch.tensor([[1, 0, 3], [2, 2, -100]])
    loss = TreeAcceptance(budget, temperature=temperature, smoothness=0.7)
    assert torch.autograd.gradcheck(lambda logits: loss(logits, target, labels), draft)


@pytest.mark.parametrize("seed", range(5))
def test_a_likelier_label_and_a_larger_tree_never_lower_the_share_inside(seed):
    draft, labels = random_laws(seed, DEPTH), torch.tensor([1, 3, 0])
    values = [TreeAcceptance(budget)(draft, None, labels) for budget in (2, 3, 5, 9, 20, 60, 90)]
    for small, large in itertools.pairwise(values):
        assert (large <= small + 1e-12).all()
    # All paths fit into the last one.
    assert float(values[-1].sum()) == pytest.approx(0.0, abs=1e-9)
    before = TreeAcceptance(6)(draft, None, labels)
    for depth in range(DEPTH):
        raised = draft.clone()
        raised[depth, labels[depth]] += 0.8
        after = TreeAcceptance(6)(raised, None, labels)
        assert (after[depth:] <= before[depth:] + 1e-12).all()
        assert float(after[depth]) < float(before[depth])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignored_depths_do_not_exist(temperature):
    draft, target = random_laws(0, DEPTH), random_laws(1, DEPTH)
    loss = TreeAcceptance(4, temperature=temperature)
    short = loss(draft[:2], target[:2], torch.tensor([1, 0]))
    for filling in (0.0, float("nan"), float("-inf")):
        draft[2:], target[2:] = filling, filling
        logits = draft.clone().requires_grad_()
        values = loss(logits, target, torch.tensor([1, 0, -100]))
        values.sum().backward()
        torch.testing.assert_close(values, torch.cat([short, torch.zeros(1)]))
        assert torch.equal(logits.grad[2], torch.zeros(VOCAB, dtype=torch.float64))
        assert logits.grad.isfinite().all()


def test_tokens_that_the_draft_rules_out_leave_the_gradient_finite():
    draft = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]] * 3).requires_grad_()
    value = TreeAcceptance(12, temperature=1.0)(draft, torch.zeros(3, 4), torch.tensor([1, 0, 3]))
    value.sum().backward()
    assert value.isfinite().all()
    assert draft.grad.isfinite().all()


def test_a_mixture_is_the_weighted_sum_and_wants_what_its_parts_want():
    draft, target, labels = random_laws(0, 2, DEPTH), random_laws(1, 2, DEPTH), torch.tensor([[1, 0, 3], [2, -100, -100]])
    tree = TreeAcceptance(6)
    mixed = MixedLoss([ForwardKL(), tree], [1.0, 0.25])
    expected = ForwardKL()(draft, target, labels) + 0.25 * tree(draft, None, labels)
    torch.testing.assert_close(mixed(draft, target, labels), expected)
    assert (mixed.uses_target, mixed.uses_path) == (True, True)
    plain = MixedLoss([CrossEntropy(), tree], [1.0, 1.0])
    assert (plain.uses_target, plain.uses_path) == (False, True)
    assert not MixedLoss([CrossEntropy(), ForwardKL()], [1.0, 1.0]).uses_path


def small_head(target, **changes):
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "block_size": 5, "mask_token_id": 60, "taps": (0, 1, 3)} | changes
    return BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes))


def small_batch():
    token_ids = torch.randint(1, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones(2, 14, dtype=torch.bool)
    loss_mask[1, 9:] = False
    return Batch(token_ids, loss_mask)


@pytest.mark.parametrize("changes", [{}, {"correction": "gated", "refinement": True}], ids=["plain", "corrected, refined"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_gives_it_whole_blocks_whatever_the_chunks(changes, temperature):
    target = Target(make_model("qwen3"))
    head, batch = small_head(target, **changes), small_batch()
    anchors, valid = sample_anchors(batch.loss_mask, 14)
    outs, grads = [], []
    for chunk_size in (1, 9, 1000):
        head.zero_grad()
        loss = MixedLoss([CrossEntropy(), TreeAcceptance(6, temperature=temperature)], [1.0, 0.5])
        settings = StepSettings(loss, 3.0, chunk_size=chunk_size)
        generator = torch.Generator().manual_seed(0)
        out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings, generator=generator)
        out.loss.backward()
        outs.append(out)
        grads.append([weight.grad.clone() for weight in head.parameters()])
    for other in (1, 2):
        for one, two in zip(outs[0], outs[other], strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
        for one, two in zip(grads[0], grads[other], strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)
    # Everything but the loss is as for a loss of single slots.
    settings = StepSettings(CrossEntropy(), 3.0)
    generator = torch.Generator().manual_seed(0)
    plain = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=settings, generator=generator)
    for one, two in zip(outs[0][1:], plain[1:], strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
    assert outs[0].loss > plain.loss


def test_training_by_it_lengthens_what_the_served_tree_keeps():
    target = Target(make_model("qwen3"))
    head, batch, loss = small_head(target), small_batch(), TreeAcceptance(6)
    anchors, valid = sample_anchors(batch.loss_mask, 14)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    hard, shares = TreeAcceptance(6, smoothness=1e-3), []
    for step in range(41):
        if step % 40 == 0:
            with torch.no_grad():
                shares.append(block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(hard)).loss)
        mixed = MixedLoss([CrossEntropy(), loss], [0.1, 1.0])
        out = block_loss(head, target, batch, anchors=anchors, valid=valid, settings=StepSettings(mixed))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert shares[0] > 0.8
    assert shares[1] < 0.3


def test_what_does_not_fit_is_refused():
    for arguments, message in (
        ({"budget": 1}, "budget must be at least 2"),
        ({"budget": 4, "temperature": -1.0}, "temperature must be 0 or a finite number above, got -1.0"),
        ({"budget": 4, "smoothness": 0.0}, "smoothness must be a finite number above 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            TreeAcceptance(**arguments)
    with pytest.raises(ValueError, match=r"target_logits must be given at temperature 1\.0"):
        TreeAcceptance(4, temperature=1.0)(torch.zeros(2, 4), None, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="at least two with a weight each, got 1 and 1 weights"):
        MixedLoss([CrossEntropy()], [1.0])
    with pytest.raises(ValueError, match=r"weights must be above 0 and finite, got \[1.0, 0.0\]"):
        MixedLoss([CrossEntropy(), ForwardKL()], [1.0, 0.0])
    target, batch = Target(make_model("qwen3")), small_batch()
    anchors, valid = sample_anchors(batch.loss_mask, 4)
    settings = StepSettings(TreeAcceptance(4), vocabulary=SampledVocabulary(torch.arange(5), 61, num_random=5))
    with pytest.raises(ValueError, match="vocabulary must be absent with a loss that ranks paths"):
        block_loss(small_head(target), target, batch, anchors=anchors, valid=valid, settings=settings)
