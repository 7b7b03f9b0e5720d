import pytest
import torch

from jetflow.trees.ranking import CHUNK, SORTED_UP_TO, best_indices, likeliest_tokens


def plain(values, count):
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


@pytest.mark.parametrize("size", [1, 2, 50, SORTED_UP_TO, SORTED_UP_TO + 1, 4000])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_best_indices_is_the_plain_rule_also_on_ties(size, levels):
    """Values of both signs, both zeros and -inf; on either side of the switch between the two ways."""
    generator = torch.Generator().manual_seed(size + levels)
    values = torch.randint(-levels, levels + 1, (3, size), generator=generator).float() / 7
    values[:, ::5] = -0.0
    values[:, ::11] = float("-inf")
    for count in {1, (size + 1) // 2, size}:
        assert best_indices(values, count).tolist() == [plain(row, count) for row in values.tolist()]


@pytest.mark.parametrize("size", [9, SORTED_UP_TO + 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_comes_first(size, sign):
    values = torch.zeros(1, size)
    values[0, 7] = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
    assert best_indices(values, 3).tolist() == [[7, 0, 1]]


@pytest.mark.parametrize("vocab", [1, 7, CHUNK, CHUNK + 1, 300, 20 * CHUNK, 3000])
@pytest.mark.parametrize("spread", [1, 40, 10**6])
def test_likeliest_tokens_is_the_plain_rule_also_on_ties(vocab, spread):
    generator = torch.Generator().manual_seed(vocab + spread)
    # All below zero, so that nothing made up could win.
    logits = torch.randint(-2 * spread, 0, (2, 3, vocab), generator=generator).float()
    for count in {1, 2, min(vocab, 9), min(vocab, 60), vocab}:
        expected = [[plain(row, count) for row in rows] for rows in logits.tolist()]
        assert likeliest_tokens(logits, count).tolist() == expected


def test_logits_are_left_as_they_are():
    logits = torch.randn(1, 2, 3000, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    likeliest_tokens(logits, 5)
    likeliest_tokens(logits, 2000)
    assert torch.equal(logits, before)
