import pytest
import torch

from jetflow import DraftContext, PromptLookupDrafter
from jetflow.drafters.prompt_lookup import CONFIDENCE


def propose(ids, budget, *, max_depth=99, **settings):
    context = DraftContext(torch.tensor([ids[-1]]), torch.tensor([len(ids) - 1]), [ids], max_depth)
    return PromptLookupDrafter(**settings).propose(context, budget)


def paths(tree):
    graph = tree.to_networkx()
    texts = []
    for leaf in (node for node in graph if graph.out_degree(node) == 0 and node):
        text = []
        while leaf:
            text.append(graph.nodes[leaf]["token"])
            leaf = next(graph.predecessors(leaf))
        texts.append(text[::-1])
    return texts


def test_copies_what_followed_the_longest_match():
    # 1 alone is also followed by 9, but the pair (0, 1) by 5 only.
    assert paths(propose([1, 9, 0, 1, 5, 6, 7, 0, 1], 4)) == [[5, 6, 7]]


def test_different_continuations_become_branches_and_share_their_beginning():
    tree = propose([0, 1, 5, 6, 0, 1, 5, 7, 0, 1, 8, 0, 1], 20, max_depth=2)
    assert sorted(paths(tree)) == [[5, 6], [5, 7], [8, 0]]


def test_later_occurrences_come_first_and_shared_ones_weigh_more():
    tree = propose([0, 1, 5, 0, 1, 6, 0, 1], 2, max_depth=1)
    assert tree.tokens.tolist() == [[1, 6]]
    tree = propose([0, 1, 5, 0, 1, 5, 0, 1, 5, 0, 1, 6, 0, 1], 2, max_depth=1)
    assert tree.tokens.tolist() == [[1, 5]]


def test_no_match_gives_the_root_alone():
    assert propose([1, 2, 3], 8).tokens.tolist() == [[3]]
    assert propose([3], 8).tokens.tolist() == [[3]]
    assert propose([3, 3], 8, max_depth=0).tokens.tolist() == [[3]]


def test_limits_are_kept():
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert propose(ids, 4).max_nodes == 4
    assert propose(ids, 1).max_nodes == 1
    assert int(propose(ids, 20, max_depth=3).depths.max()) == 3
    # At most what there is: an occurrence near the end is short.
    assert propose([5, 5, 5], 20, max_ngram=2).tokens.tolist() == [[5, 5]]


def test_rows_are_independent_and_padded():
    rows = [[1, 2, 3, 1, 2], [7, 8, 9], [4, 4, 4, 4]]
    context = DraftContext(torch.tensor([2, 9, 4]), torch.tensor([4, 2, 3]), rows, 9)
    batch = PromptLookupDrafter().propose(context, 6)
    for index, ids in enumerate(rows):
        single = propose(ids, 6, max_depth=9)
        count = int(batch.num_nodes[index])
        assert count == single.max_nodes
        assert batch.tokens[index, :count].tolist() == single.tokens[0].tolist()


@pytest.mark.parametrize("name", ["max_ngram", "max_depth", "max_matches"])
def test_settings_below_one_are_refused(name):
    with pytest.raises(ValueError, match=name):
        PromptLookupDrafter(**{name: 0})


def test_scores_say_how_far_so_long_an_agreement_can_be_trusted():
    # The pair (1, 2) occurred once before; each further token is trusted more.
    tree = propose([1, 2, 5, 6, 7, 1, 2], 4)
    assert tree.tokens.tolist() == [[2, 5, 6, 7]]
    expected = torch.tensor(CONFIDENCE[1:4]).log().cumsum(0)
    torch.testing.assert_close(tree.scores[0, 1:], expected)
    # Two occurrences that differ share the trust of theirs.
    tree = propose([1, 2, 5, 1, 2, 6, 1, 2], 3, max_depth=1)
    assert abs(float(tree.scores[0, 1:].exp().sum()) - CONFIDENCE[1]) < 1e-6


def test_unlikely_nodes_are_not_proposed():
    ids = [3, 5, 0, 3, 6, 0, 3, 7, 0, 3, 8, 0, 3, 9, 0, 1, 3]
    assert propose(ids, 20, max_depth=1, min_prob=0.05).max_nodes < propose(ids, 20, max_depth=1, min_prob=0.0).max_nodes
    with pytest.raises(ValueError, match=r"min_prob must be in \[0, 1\), got 1.0"):
        PromptLookupDrafter(min_prob=1.0)
