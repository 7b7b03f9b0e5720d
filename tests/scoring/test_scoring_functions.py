import math

import pytest
import torch

from jetflow import Candidates
from jetflow.scoring import (
    DepthPenalty,
    EntropyGuided,
    Hybrid,
    RankPenalty,
    TemperatureCalibrated,
    cumulative_log_prob,
)

PROBS = torch.tensor([[[0.5, 0.25], [0.9, 0.05]]])
PARENTS = torch.tensor([[[-1.0], [-2.0]]])


def candidates(depth=3):
    log_probs = PROBS.log()
    return Candidates(log_probs, PARENTS + log_probs, depth, torch.arange(2), PARENTS)


def entropies():
    laws = [[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]
    return torch.tensor([[[-sum(p * math.log(p) for p in law)] for law in laws]])


def test_values_by_hand():
    offered = candidates()
    cumulative = PARENTS + PROBS.log()
    assert torch.equal(cumulative_log_prob(offered), cumulative)
    torch.testing.assert_close(EntropyGuided()(offered), -entropies().expand(1, 2, 2))
    torch.testing.assert_close(Hybrid(0.5)(offered), cumulative - 0.5 * entropies())
    assert torch.equal(Hybrid(0.0)(offered), cumulative)
    torch.testing.assert_close(DepthPenalty(0.25)(offered), cumulative - 0.75)
    torch.testing.assert_close(RankPenalty(2.0)(offered), cumulative - torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(RankPenalty(2.0, DepthPenalty(1.0))(offered), cumulative - torch.tensor([3.0, 5.0]))


def test_temperature_flattens_each_law_with_the_rest_as_one_outcome():
    tempered = TemperatureCalibrated(2.0)(candidates())
    roots = torch.tensor([[[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]]).sqrt()
    torch.testing.assert_close(tempered, PARENTS + (roots / roots.sum(-1, keepdim=True)).log()[..., :2])
    torch.testing.assert_close(TemperatureCalibrated(1.0)(candidates()), PARENTS + PROBS.log())


def test_certain_laws_have_no_entropy_and_no_nan():
    certain = Candidates(
        torch.tensor([[[0.0, float("-inf")]]]), torch.tensor([[[0.0, float("-inf")]]]), 1, torch.arange(2), torch.zeros(1, 1, 1)
    )
    assert EntropyGuided()(certain).abs().max() == 0
    assert TemperatureCalibrated(2.0)(certain)[0, 0, 0] == 0


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        (Hybrid, -1.0, "entropy_weight must be at least 0 and finite, got -1"),
        (RankPenalty, -1.0, "penalty must be at least 0 and finite, got -1"),
        (DepthPenalty, float("inf"), "penalty must be finite, got inf"),
        (TemperatureCalibrated, 0.0, "temperature must be positive and finite, got 0"),
    ],
)
def test_bad_settings_are_refused(make, value, message):
    with pytest.raises(ValueError, match=message):
        make(value)
    with pytest.raises(ValueError, match="finite, got nan"):
        make(float("nan"))
