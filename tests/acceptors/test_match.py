import pytest
import torch
from scipy.stats import chisquare

from jetflow import GreedyAcceptor, SamplingAcceptor, TokenTree

# One false alarm in 10,000 runs; seeds are fixed, so a pass stays a pass.
MIN_P_VALUE = 1e-4
NUM_DRAWS = 20_000
COLUMNS = ("tokens", "parents", "depths", "scores", "num_nodes")


def two_level_tree() -> TokenTree:
    """Children 0 and 1 of the root; 2 below the first, 0 and 3 below the second."""
    return TokenTree.from_parents([[4, 0, 1, 2, 0, 3]], [[-1, 0, 0, 1, 2, 2]])


def test_greedy_follows_the_path_and_not_the_first_child():
    tree = two_level_tree()
    logits = torch.zeros(1, 6, 5)
    logits[0, 0, 1] = logits[0, 2, 3] = logits[0, 5, 2] = 1.0
    acceptance = GreedyAcceptor()(tree, logits)
    assert acceptance.path.tolist() == [[0, 2, 5]]
    assert acceptance.num_accepted.tolist() == [2]
    assert acceptance.bonus.tolist() == [2]


def test_rows_of_a_batch_end_at_different_depths():
    one = two_level_tree()
    tree = TokenTree.from_parents(one.tokens.repeat(3, 1), one.parents.repeat(3, 1), num_nodes=[6, 6, 3])
    logits = torch.zeros(3, 6, 5)
    logits[0, 0, 4] = 1.0
    logits[1:, 0, 1] = logits[1:, 2, 3] = logits[1:, 5, 2] = 1.0
    acceptance = GreedyAcceptor()(tree, logits)
    assert acceptance.num_accepted.tolist() == [0, 2, 1]
    assert acceptance.bonus.tolist() == [4, 2, 3]
    assert acceptance.path.tolist() == [[0, 0, 0], [0, 2, 5], [0, 2, 2]]


def test_ties_go_to_the_lowest_id():
    acceptance = GreedyAcceptor()(TokenTree.root_only(torch.tensor([3])), torch.ones(1, 1, 7))
    assert acceptance.bonus.tolist() == [0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 1.7, "top_k": 4, "top_p": 0.9},
    ],
)
def test_emitted_tokens_have_exactly_the_targets_law(settings):
    """The first two tokens of the text, against the law computed by hand."""
    torch.manual_seed(0)
    logits = torch.randn(1, 6, 5)
    logits[0, 0, :2] += 1.5
    # Below a node that is not in the tree the text goes on in later rounds; any law does, here that of node 0.
    law = processed_law(logits[0], **settings)
    tree, acceptor = two_level_tree(), SamplingAcceptor(**settings)
    generator = torch.Generator().manual_seed(1)
    # All draws as rows of one batch.
    rows = TokenTree(*(getattr(tree, name).expand(NUM_DRAWS, *(-1,) * (getattr(tree, name).dim() - 1)) for name in COLUMNS))
    path, num_accepted, bonus = acceptor(rows, logits.expand(NUM_DRAWS, -1, -1), generator=generator)
    counts = torch.zeros(5, 5)
    alone = torch.multinomial(law[0], NUM_DRAWS, replacement=True, generator=generator).tolist()
    found = zip(rows.tokens.gather(1, path).tolist(), num_accepted.tolist(), bonus.tolist(), alone, strict=True)
    for tokens, count, last, other in found:
        text = [*tokens[1 : count + 1], last, other]
        counts[text[0], text[1]] += 1
    accepted = int((num_accepted > 0).sum())
    expected = torch.stack([law[0, first] * law[{0: 1, 1: 2}.get(first, 0)] for first in range(5)])
    assert accepted > NUM_DRAWS / 10
    possible = expected > 0
    assert not counts[~possible].any()
    frequencies = expected[possible].double()
    assert chisquare(counts[possible], frequencies / frequencies.sum() * NUM_DRAWS).pvalue > MIN_P_VALUE


def processed_law(logits, temperature=1.0, top_k=None, top_p=None):
    probs = (logits.double() / temperature).softmax(-1)
    for row in probs:
        order = row.argsort(descending=True)
        kept = order[: top_k or len(order)]
        row[[i for i in range(len(row)) if i not in kept.tolist()]] = 0
        row /= row.sum()
        if top_p is not None:
            before = row[order].cumsum(0) - row[order]
            row[order[before >= top_p]] = 0
            row /= row.sum()
    return probs


def test_unusable_logits_are_marked_and_others_are_not():
    tree = TokenTree.root_only(torch.tensor([3, 3, 3]))
    logits = torch.zeros(3, 1, 4)
    logits[0, 0, 2] = float("nan")
    logits[1] = float("-inf")
    logits[2, 0, :3] = float("-inf")
    for acceptor in (GreedyAcceptor(), SamplingAcceptor(1.0)):
        assert acceptor(tree, logits).bonus.tolist() == [-1, -1, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingAcceptor(**settings)


def test_logits_of_another_tree_are_refused():
    with pytest.raises(ValueError, match=r"logits must be \[B, N, V\]"):
        GreedyAcceptor()(two_level_tree(), torch.zeros(1, 5, 5))
