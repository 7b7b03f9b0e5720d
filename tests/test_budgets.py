import pytest
import torch

from jetflow import ThroughputBudget


def test_picks_the_size_with_the_best_expected_rate():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.05]]).log()
    seconds = {1: 1.0, 2: 1.5, 3: 1.6, 4: 4.0}
    expected = {n: float(scores.exp()[0, :n].sum()) / seconds[n] for n in seconds}
    assert ThroughputBudget(seconds)(scores, []) == max(expected, key=expected.get) == 2


def test_batches_sum_over_rows_and_short_trees_are_never_padded():
    scores = torch.tensor([[1.0, 0.9], [1.0, 0.1]]).log()
    policy = ThroughputBudget({1: 1.0, 2: 1.4, 8: 1.45})
    assert policy(scores, []) == 2
    assert policy.max_nodes == 8
    assert policy(scores[1:], []) == 1


@pytest.mark.parametrize("seconds", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}])
def test_bad_tables_are_refused(seconds):
    with pytest.raises(ValueError, match="round_seconds"):
        ThroughputBudget(seconds)
