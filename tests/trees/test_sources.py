import pytest
import torch

from jetflow import Frontier, MarginalSource, PairwiseSource


def test_log_probs_are_those_of_the_whole_vocabulary():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    source = MarginalSource.from_logits(logits, 5, temperature=0.7)
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(source.log_probs, expected.gather(-1, source.tokens))
    assert torch.equal(source.log_probs, source.log_probs.sort(dim=-1, descending=True).values)
    assert MarginalSource.from_logits(logits, 99).tokens.shape == (2, 3, 50)


def test_pairwise_children_follow_their_parents_row():
    tokens = torch.tensor([[[4, 7], [1, 2]]])
    first = torch.tensor([[0.3, 0.7]]).log()
    table = torch.tensor([[[[0.9, 0.1], [0.2, 0.8]]]]).log()
    source = PairwiseSource(tokens, first, table)
    got, log_probs = source(1, Frontier(torch.tensor([[3]]), torch.zeros(1, 1).long(), torch.zeros(1, 1)))
    assert got.tolist() == [[[7, 4]]]
    got, log_probs = source(2, Frontier(torch.tensor([[7, 4]]), torch.zeros(1, 2).long(), torch.zeros(1, 2)))
    assert got.tolist() == [[[2, 1], [1, 2]]]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[[0.8, 0.2], [0.9, 0.1]]]))


@pytest.mark.parametrize("added", [0.0, 0.5, 300.0, -300.0])
@pytest.mark.parametrize("some", [True, False])
def test_corrected_children_sum_to_at_most_one_however_large_the_correction(added, some):
    logits = 4 * torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 7] = 90.0
    logits[1, 2, 1:] = -torch.inf

    def additions(parents, candidates):
        return added * torch.eye(8)[0].expand(2, 2, 8, -1) if some else torch.full((2, 2, 8, 8), added)

    law = PairwiseSource.from_logits(logits, 8, additions).laws(3).log_probs[:, 1:]
    assert not law.isnan().any()
    assert (law.exp().sum(-1) <= 1 + 1e-6).all()
    if some and added == 300.0:
        assert (law[..., 0].exp() > 0.99).all()
    if some and added == -300.0:
        # The last depth has one token alone, which stays certain.
        assert (law[0, :, :, 0].exp() < 0.01).all()
        assert (law[1, 0, :, 0].exp() < 0.01).all()
        assert (law[1, 1, :, 0] == 0).all()
    if added == 0.0:
        plain = MarginalSource.from_logits(logits, 8).log_probs[:, 1:, None].expand_as(law)
        torch.testing.assert_close(law, plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_without_a_law_are_refused(bad):
    logits = torch.zeros(1, 2, 4)
    logits[0, 1, 2] = bad
    with pytest.raises(ValueError, match="must have a law"):
        MarginalSource.from_logits(logits, 2)
    with pytest.raises(ValueError, match="must have a law"):
        MarginalSource.from_logits(torch.full((1, 2, 4), float("-inf")), 2)


def test_bad_arguments_are_refused():
    logits = torch.zeros(1, 2, 4)
    for arguments, message in (
        ((logits, 0), "width"),
        ((logits[0], 2), r"\[B, D, V\]"),
        ((logits.long(), 2), "floats"),
    ):
        with pytest.raises(ValueError, match=message):
            MarginalSource.from_logits(*arguments)
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature must be positive and finite"):
            MarginalSource.from_logits(logits, 2, temperature=temperature)
    with pytest.raises(ValueError, match=r"tokens must be int64, got torch\.int32"):
        MarginalSource(torch.zeros(1, 2, 4).int(), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"log_probs must be float32, got torch\.float64"):
        MarginalSource(torch.zeros(1, 2, 4).long(), torch.zeros(1, 2, 4).double())
    with pytest.raises(ValueError, match="share one shape"):
        MarginalSource(torch.zeros(1, 2, 4).long(), torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="log_probs"):
        PairwiseSource(torch.zeros(1, 2, 4).long(), torch.zeros(1, 4), torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"tokens must be \[B, D, K\]"):
        PairwiseSource(torch.zeros(2, 4).long(), torch.zeros(1, 4), torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lower_token(dtype):
    logits = torch.zeros(1, 1, 500, dtype=dtype)
    logits[0, 0, [71, 400, 460]] = 2.0
    source = MarginalSource.from_logits(logits, 5)
    assert source.tokens.tolist() == [[[71, 400, 460, 0, 1]]]
    assert source.log_probs.dtype == torch.float32
