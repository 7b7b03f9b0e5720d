"""AcceptanceTable: fitted shares, blindness to tokens, and what drawn trees gain by it."""

import math

import pytest
import torch

from jetflow import AcceptanceTable, BestFirst, ChildSampling, FixedShape, MarginalSource, TokenTree
from jetflow.protocols import Acceptance, Candidates
from jetflow.scoring.acceptance_table import ENTROPY_EDGES


def candidates(log_probs, parent=0.0):
    width = log_probs.shape[-1]
    return Candidates(log_probs, log_probs, 1, torch.arange(width), torch.full((*log_probs.shape[:2], 1), parent))


def test_priorities_are_the_logs_of_the_shares_of_the_laws_bin():
    shares = torch.tensor([[0.8, 0.1], [0.5, 0.25]])
    table = AcceptanceTable(shares, edges=[0.5])
    sharp, flat = torch.tensor([0.97, 0.02, 0.01]).log(), torch.tensor([0.4, 0.3, 0.3]).log()
    got = table(candidates(torch.stack([sharp, flat])[None], parent=-1.0))[0]
    expected = torch.tensor([[0.8, 0.1], [0.5, 0.25]]).log() - 1.0
    torch.testing.assert_close(got[:, :2], expected)
    # Beyond the table ranks go on falling.
    assert (got[:, 2] < got[:, 1]).all()


def test_the_order_of_the_draws_does_not_matter():
    table = AcceptanceTable()
    law = torch.randn(1, 1, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert torch.equal(table(candidates(law)), table(candidates(law.flip(-1))))


def test_fit_counts_which_child_was_accepted():
    observations = [(0.2, 0)] * 70 + [(0.2, 1)] * 20 + [(0.2, None)] * 10 + [(2.5, None)] * 50
    table = AcceptanceTable.fit(observations, num_ranks=2)
    shares = table._log_shares.exp()
    row = int(torch.searchsorted(torch.tensor(ENTROPY_EDGES), 0.2))
    assert abs(float(shares[row, 0]) - 0.7) < 0.02
    assert abs(float(shares[row, 1]) - 0.2) < 0.02
    assert float(shares[int(torch.searchsorted(torch.tensor(ENTROPY_EDGES), 2.5)), 0]) < 0.02


def test_rounds_are_observed():
    logits = torch.tensor([[[0.0, 0.0, -30.0], [3.0, 0.0, 0.0]]])
    source = MarginalSource.from_logits(logits, 3)
    generator = torch.Generator().manual_seed(0)
    tree = ChildSampling().build(FixedShape([-1, 0, 0, 2], [0, 0, 1, 0]), torch.tensor([2]), source, 4, generator)
    acceptance = Acceptance(torch.tensor([[0, 2, 3]]), torch.tensor([2]), torch.tensor([0]))
    (first, second), (third, fourth) = AcceptanceTable.observe(tree, acceptance)
    assert (round(first, 3), second) == (0.693, 1)
    assert (third < 0.5, fourth) == (True, 0)
    stopped = Acceptance(torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0]))
    assert AcceptanceTable.observe(tree, stopped)[0][1] is None
    with pytest.raises(ValueError, match="tree must be one of drawn children"):
        AcceptanceTable.observe(TokenTree.root_only(torch.tensor([2])), stopped)


def test_drawn_trees_go_deeper_where_laws_are_sharp():
    """A sharp law is worth a chain, a flat one many children of the root."""
    sharp, flat = (torch.tensor([math.log(p), *[math.log((1 - p) / 9)] * 9]).expand(1, 6, -1) for p in (0.98, 0.1))
    depths = []
    for logits in (sharp, flat):
        source = MarginalSource.from_logits(logits, 10)
        generator = torch.Generator().manual_seed(0)
        tree = ChildSampling().build(BestFirst(AcceptanceTable()), torch.tensor([3]), source, 8, generator)
        depths.append(int(tree.depths.max()))
        assert tree.laws.probs[0, 0].sum().isclose(torch.tensor(1.0))
    assert depths[0] > depths[1]


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match=r"shares must be \[2, R\] for 1 edges, got \[3, 2\]"):
        AcceptanceTable(torch.full((3, 2), 0.5), edges=[0.5])
    with pytest.raises(ValueError, match=r"shares must be in \(0, 1\)"):
        AcceptanceTable(torch.tensor([[0.5, 0.0], [0.5, 0.1]]), edges=[0.5])
    for settings, message in (
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"num_fixed": -1}, "num_fixed must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            ChildSampling(**settings)


def test_children_must_be_the_first_draws():
    """A shape that leaves out a draw would bias the text."""
    source = MarginalSource.from_logits(torch.zeros(1, 2, 10), 10)
    with pytest.raises(ValueError, match=r"the children of node 0 must be its first draws, got draws \[1\]"):
        ChildSampling().build(FixedShape([-1, 0], [0, 1]), torch.tensor([3]), source, 2, torch.Generator().manual_seed(0))
