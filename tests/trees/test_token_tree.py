import random

import networkx
import pytest
import torch

from jetflow import TokenTree


def random_parents(rng, count):
    return [-1] + [rng.randrange(node) for node in range(1, count)]


def test_ancestor_mask_is_brute_force_on_random_trees():
    rng = random.Random(0)
    for _ in range(200):
        count, padding = rng.randint(1, 40), rng.randint(0, 3)
        parents = random_parents(rng, count)
        tree = TokenTree.from_parents([list(range(count + padding))], [parents + [-1] * padding], num_nodes=[count])
        expected = torch.eye(count + padding, dtype=torch.bool)
        for node in range(count):
            above = parents[node]
            while above >= 0:
                expected[node, above] = True
                above = parents[above]
        assert torch.equal(tree.ancestor_mask()[0], expected)
        assert tree.depths[0, :count].tolist() == (expected[:count].sum(1) - 1).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 33])
def test_ancestor_mask_of_chains_reaches_the_root(count):
    tree = TokenTree.from_parents([list(range(count))], [list(range(-1, count - 1))])
    assert torch.equal(tree.ancestor_mask()[0], torch.ones(count, count).tril().bool())


def test_networkx_round_trip():
    tree = TokenTree.from_parents([[5, 7, 8, 9]], [[-1, 0, 0, 1]], [[0.0, -1.0, -2.0, -1.5]])
    again = TokenTree.from_networkx(tree.to_networkx())
    assert networkx.is_isomorphic(tree.to_networkx(), again.to_networkx(), node_match=lambda a, b: a == b)


def test_graphs_that_are_no_trees_are_refused():
    with pytest.raises(ValueError, match="one tree"):
        TokenTree.from_networkx(networkx.DiGraph([(0, 1), (2, 1)]))
    with pytest.raises(ValueError, match="'token'"):
        TokenTree.from_networkx(networkx.DiGraph([(0, 1)]))


@pytest.mark.parametrize(
    ("tokens", "parents", "extra", "message"),
    [
        ([[1, 2]], [[0, 0]], {}, r"parents\[0, 0\]=0 must be -1"),
        ([[1, 2]], [[-1, 1]], {}, r"parents\[0, 1\]=1 must be in \[0, 1\)"),
        ([[1, 2, 2]], [[-1, 0, 0]], {}, "token 2 stands twice below node 0"),
        ([[1, 2]], [[-1, 0]], {"scores": [[0.0, 0.5]]}, r"scores\[0, 1\]=0.5"),
        ([[1, 2]], [[-1, 0]], {"scores": [[0.0, float("nan")]]}, r"scores\[0, 1\]=nan"),
        ([[1, 2]], [[-1, 0]], {"scores": [[0.0]]}, "scores must have the shape"),
        ([[1, 2]], [[-1, 0]], {"num_nodes": [3]}, r"num_nodes\[0\]=3 must be in \[1, 2\]"),
        ([[1, 2]], [[-1]], {}, "must share one shape"),
        ([[1.0, 2.0]], [[-1, 0]], {}, "must be int64 or int32"),
    ],
)
def test_broken_trees_are_refused(tokens, parents, extra, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents), **extra)


def test_first_keeps_a_tree_and_the_root():
    tree = TokenTree.from_parents([[5, 7, 8, 9]], [[-1, 0, 0, 1]], num_nodes=[3])
    assert tree.first(2).tokens.tolist() == [[5, 7]]
    assert tree.first(4).num_nodes.tolist() == [3]
    with pytest.raises(ValueError, match="num_nodes"):
        tree.first(0)
