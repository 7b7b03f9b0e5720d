"""Losses: values by plain loops, gradients by finite differences, and the inputs that break naive versions."""

import math

import pytest
import torch

from jetflow.losses import (
    CrossEntropy,
    ForwardKL,
    JensenShannon,
    LogAcceptance,
    ReverseKL,
    TotalVariation,
    exponential_position_weights,
    weighted_mean,
)

LOSSES = [
    CrossEntropy(), ForwardKL(), ReverseKL(), ForwardKL(2.5), ReverseKL(0.5),
    JensenShannon(), JensenShannon(2.0), TotalVariation(), TotalVariation(2.0), LogAcceptance(), LogAcceptance(2.0),
]  # fmt: skip
IDS = ["ce", "forward", "reverse", "forward-T2.5", "reverse-T0.5", "js", "js-T2", "tv", "tv-T2", "lk", "lk-T2"]
# float32 sums of a few dozen terms of size 1.
ATOL = 1e-5
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=IDS)


def random_case(*shape, vocab=7, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(*shape, vocab, generator=generator, dtype=dtype) * 3
    target = torch.randn(*shape, vocab, generator=generator, dtype=dtype) * 3
    labels = torch.randint(vocab, shape, generator=generator)
    return draft, target, labels


def plain_softmax(logits, temperature):
    exps = [math.exp(value / temperature) for value in logits]
    return [value / sum(exps) for value in exps]


def plain_kl(left, right):
    return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True) if a > 0)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_values_match_the_formula_written_as_loops(temperature):
    draft, target, labels = random_case(2, 3)
    forward, reverse = ForwardKL(temperature)(draft, target, labels), ReverseKL(temperature)(draft, target, labels)
    entropy = CrossEntropy()(draft, target, labels)
    for i in range(2):
        for j in range(3):
            q = plain_softmax(draft[i, j].tolist(), temperature)
            p = plain_softmax(target[i, j].tolist(), temperature)
            assert forward[i, j].item() == pytest.approx(temperature**2 * plain_kl(p, q), rel=1e-4)
            assert reverse[i, j].item() == pytest.approx(temperature**2 * plain_kl(q, p), rel=1e-4)
            plain = -math.log(plain_softmax(draft[i, j].tolist(), 1.0)[labels[i, j]])
            assert entropy[i, j].item() == pytest.approx(plain, rel=1e-4)


@every_loss
def test_gradient_is_right_and_only_the_draft_gets_one(loss):
    draft, target, labels = random_case(2, 3, dtype=torch.float64)
    labels[0, 1] = -100
    draft.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, target, labels), (draft,))
    target.requires_grad_()
    loss(draft, target, labels).sum().backward()
    assert target.grad is None


@pytest.mark.parametrize("loss", LOSSES[1:], ids=IDS[1:])
def test_equal_laws_give_exactly_zero(loss):
    draft, _, labels = random_case(5)
    draft[0] = torch.tensor([500.0, -500.0, 0.0, 0.0, 1.0, 2.0, -torch.inf])
    assert torch.equal(loss(draft, draft.clone(), labels), torch.zeros(5))


@every_loss
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2]], ids=["all", "one"])
def test_ignored_labels_give_zero_and_no_gradient(loss, rows):
    draft, target, labels = random_case(4)
    clean = loss(draft, target, labels)
    draft[rows, 1], target[rows, 2] = torch.nan, -torch.inf
    labels[rows] = -100
    draft.requires_grad_()
    values = loss(draft, target, labels)
    weighted_mean(values, (labels != -100).float()).backward()
    kept = [row for row in range(4) if row not in rows]
    assert torch.equal(values[rows], torch.zeros(len(rows)))
    assert torch.equal(values[kept], clean[kept])
    assert torch.equal(draft.grad[rows], torch.zeros(len(rows), 7))
    assert draft.grad.isfinite().all()
    assert (draft.grad[kept].abs().sum(-1) > 0).all()


@every_loss
def test_target_logits_of_minus_infinity(loss):
    draft, target, labels = random_case(3)
    target[:, 2] = -torch.inf
    target[1] = torch.tensor([0.0] + [-torch.inf] * 6)
    labels[:] = 0
    draft.requires_grad_()
    values = loss(draft, target, labels)
    values.sum().backward()
    assert values.isfinite().all()
    assert draft.grad.isfinite().all()


def test_forward_kl_of_a_one_hot_target_is_cross_entropy():
    draft, target, labels = random_case(4)
    target = torch.full_like(target, -torch.inf).scatter(-1, labels.unsqueeze(-1), 0.0)
    torch.testing.assert_close(ForwardKL()(draft, target, labels), CrossEntropy()(draft, target, labels))


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_confident_draft_that_is_wrong_has_finite_values_and_gradients(loss, dtype):
    draft = torch.zeros(1, 7, dtype=dtype)
    draft[0, 0] = 6e4
    target = torch.zeros(1, 7, dtype=dtype)
    target[0, 1:3], target[0, 0] = torch.tensor([6e4, -torch.inf], dtype=dtype), -torch.inf
    draft.requires_grad_()
    value = loss(draft, target, torch.tensor([1]))
    value.sum().backward()
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert draft.grad.isfinite().all()


def test_reverse_kl_survives_underflow_next_to_minus_infinity_and_floors_the_target():
    # Draft probabilities of the last two tokens underflow to 0; the target never takes the last one.
    draft = torch.tensor([[1.0, 0.0, -400.0, -torch.inf]], requires_grad=True)
    target = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    value = ReverseKL()(draft, target, torch.tensor([0]))
    value.sum().backward()
    q = plain_softmax([1.0, 0.0], 1.0)
    log_p = 1.0 - math.log(math.e + 1.0)
    expected = q[0] * (math.log(q[0]) - log_p) + q[1] * (math.log(q[1]) + 100.0)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert draft.grad.isfinite().all()
    assert draft.grad[0, 1] > 0


def test_half_precision_logits_are_compared_in_float32():
    draft, target, labels = random_case(4, vocab=50)
    draft, target = draft.bfloat16(), target.bfloat16()
    for loss in LOSSES:
        torch.testing.assert_close(loss(draft, target, labels), loss(draft.float(), target.float(), labels))


@every_loss
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, t, y: (d, t[..., :-1], y), r"target_logits must have the shape of draft_logits, \(2, 3, 7\)"),
        (lambda d, t, y: (d, t, y[:, :-1]), r"labels must have the shape of draft_logits without V, \(2, 3\)"),
        (lambda d, t, y: (d.long(), t, y), "draft_logits must be floating point, got torch.int64"),
        (lambda d, t, y: (d, t.long(), y), "target_logits must be floating point, got torch.int64"),
        (lambda d, t, y: (d, t, y.float()), "labels must be int64, got torch.float32"),
    ],
)
def test_inputs_that_do_not_fit_are_named(loss, change, message):
    with pytest.raises(ValueError, match=message):
        loss(*change(*random_case(2, 3)))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", [ForwardKL, ReverseKL])
def test_temperature_must_be_above_zero(kind, temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number above 0, got"):
        kind(temperature)


def test_position_weights():
    assert exponential_position_weights(5, 0).tolist() == [1.0] * 4
    expected = [math.exp(-(i - 1) / 4.0) for i in range(1, 16)]
    assert exponential_position_weights(16, 4.0).tolist() == pytest.approx(expected)
    for rate in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="decay_rate must be 0"):
            exponential_position_weights(16, rate)
    with pytest.raises(ValueError, match="block_size must be at least 2, got 1"):
        exponential_position_weights(1, 0)


@pytest.mark.parametrize("decay_rate", [0.0, 0.5, 4.0])
def test_mean_of_a_constant_is_that_constant_for_any_weights(decay_rate):
    weights = exponential_position_weights(16, decay_rate)
    assert weighted_mean(torch.full_like(weights, 2.5), weights).item() == pytest.approx(2.5)


def test_weighted_mean_ignores_what_has_no_weight():
    values = torch.tensor([1.0, torch.nan, 4.0], requires_grad=True)
    mean = weighted_mean(values, torch.tensor([1.0, 0.0, 3.0]))
    mean.backward()
    assert mean.item() == pytest.approx(13 / 4)
    assert values.grad.tolist() == [0.25, 0.0, 0.75]


def test_weighted_mean_of_nothing_is_zero_with_a_zero_gradient():
    for count in (0, 3):
        values = torch.full((count,), torch.nan, requires_grad=True)
        mean = weighted_mean(values, torch.zeros(count))
        mean.backward()
        assert mean.item() == 0.0
        assert torch.equal(values.grad, torch.zeros(count))
    with pytest.raises(ValueError, match=r"weights must have the shape of values, \(2,\), got \(3,\)"):
        weighted_mean(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_symmetric_and_acceptance_losses_match_the_formula_written_as_loops(temperature):
    draft, target, labels = random_case(2, 3)
    found = [kind(temperature)(draft, target, labels) for kind in (JensenShannon, TotalVariation, LogAcceptance)]
    for i in range(2):
        for j in range(3):
            q = plain_softmax(draft[i, j].tolist(), temperature)
            p = plain_softmax(target[i, j].tolist(), temperature)
            mixture = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
            overlap = sum(min(a, b) for a, b in zip(p, q, strict=True))
            expected = (
                temperature**2 * (plain_kl(p, mixture) + plain_kl(q, mixture)) / 2,
                sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
                -math.log(overlap),
            )
            for value, wanted in zip(found, expected, strict=True):
                assert value[i, j].item() == pytest.approx(wanted, rel=1e-4)
            assert found[1][i, j].item() == pytest.approx(1 - overlap, rel=1e-4)


def test_loss_of_the_acceptance_probability_is_cross_entropy_for_a_certain_target():
    draft, _, labels = random_case(4)
    target = torch.full_like(draft, -torch.inf).scatter(-1, labels[:, None], 0.0)
    torch.testing.assert_close(
        LogAcceptance()(draft, target, labels), CrossEntropy()(draft, target, labels), atol=ATOL, rtol=1e-5
    )


def test_laws_that_do_not_meet_give_finite_losses_with_a_way_back():
    # Probabilities below the smallest float32, not only small ones.
    draft = torch.tensor([[0.0, -300.0]], requires_grad=True)
    target = torch.tensor([[-torch.inf, 0.0]])
    loss = LogAcceptance()(draft, target, torch.tensor([1]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert draft.grad.isfinite().all()
    assert draft.grad[0, 1] < 0 < draft.grad[0, 0]
    assert TotalVariation()(draft, target, torch.tensor([1])).item() == pytest.approx(1.0)
    assert JensenShannon()(draft, target, torch.tensor([1])).item() == pytest.approx(math.log(2), rel=1e-5)


def test_cross_entropy_needs_no_target():
    draft, target, labels = random_case(2, 3)
    assert torch.equal(CrossEntropy()(draft, None, labels), CrossEntropy()(draft, target, labels))
    assert not CrossEntropy.uses_target
