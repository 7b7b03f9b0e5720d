"""Expanders against brute force, against the published algorithm written with a heap, and against reference trees."""

import heapq
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from jetflow import (
    Beam,
    BestFirst,
    Chain,
    FanoutBestFirst,
    FixedShape,
    GreedyAcceptor,
    MarginalSource,
    PairwiseSource,
    TokenTree,
)
from jetflow.scoring import DepthPenalty, EntropyGuided, Hybrid, RankPenalty, TemperatureCalibrated

DATA = Path(__file__).parents[1] / "data"
ROOT = torch.tensor([3])
# Sums of float32 log-probabilities in another order.
TOLERANCE = 1e-5


def marginal(seed, depth=4, vocab=5, batch=1, width=None, spread=2.0):
    logits = spread * torch.randn(batch, depth, vocab, generator=torch.Generator().manual_seed(seed))
    return MarginalSource.from_logits(logits, width or vocab)


def pairwise(seed, depth=4, vocab=4):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(depth)])[None]
    first = (2 * torch.randn(1, vocab, generator=generator)).log_softmax(-1)
    table = (2 * torch.randn(1, depth - 1, vocab, vocab, generator=generator)).log_softmax(-1)
    source = PairwiseSource(tokens, first, table)
    source.tables = (tokens[0].tolist(), first[0], table[0])
    return source


def path_log_prob(source, path):
    """Score of a path of (token, ...) straight from the tables."""
    if isinstance(source, MarginalSource):
        rows = zip(source.tokens[0].tolist(), source.log_probs[0].tolist(), strict=True)
        tables = [dict(zip(tokens, log_probs, strict=True)) for tokens, log_probs in rows]
        return sum(tables[level][token] for level, token in enumerate(path))
    tokens, first, table = source.tables
    index = [tokens[level].index(token) for level, token in enumerate(path)]
    return float(first[index[0]]) + sum(float(table[d, index[d], index[d + 1]]) for d in range(len(path) - 1))


def all_paths(source, vocab):
    for length in range(1, source.max_depth + 1):
        for path in itertools.product(range(vocab), repeat=length):
            yield path, path_log_prob(source, path)


def tree_paths(tree, row=0):
    """Maps each drafted node's path of tokens to its score."""
    paths = {0: ()}
    result = {}
    for node in range(1, int(tree.num_nodes[row])):
        paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        result[paths[node]] = float(tree.scores[row, node])
    return result


def heap_fanout(source, budget, width):
    """Algorithm 1 as published, for a table of marginals."""
    nodes, order = [(3, -1, 0, 0.0)], itertools.count()
    heap = [(0.0, next(order), 0)]
    while len(nodes) < budget and heap:
        negative, _, node = heapq.heappop(heap)
        depth = nodes[node][2]
        if depth == source.max_depth:
            continue
        for rank in range(min(width, budget - len(nodes), source.tokens.shape[2])):
            log_prob = float(source.log_probs[0, depth, rank])
            if log_prob == float("-inf"):
                continue
            nodes.append((int(source.tokens[0, depth, rank]), node, depth + 1, -negative + log_prob))
            heapq.heappush(heap, (negative - log_prob, next(order), len(nodes) - 1))
    return nodes


def check_invariants(tree, budget):
    for row in range(tree.batch_size):
        count = int(tree.num_nodes[row])
        assert 1 <= count <= budget
        # The checked constructor raises on any broken rule.
        checked = TokenTree.from_parents(
            tree.tokens[row : row + 1], tree.parents[row : row + 1], tree.scores[row : row + 1], num_nodes=[count]
        )
        for name in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(checked, name)[0], getattr(tree, name)[row]), name
        assert tree.scores[row, :count].isfinite().all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 40, 2000])
@pytest.mark.parametrize(("make", "vocab"), [(marginal, 5), (pairwise, 4)])
def test_best_first_is_brute_force(make, vocab, budget, seed):
    source = make(seed)
    tree = BestFirst()(ROOT, source, budget)
    check_invariants(tree, budget)
    best = sorted(all_paths(source, vocab), key=lambda item: -item[1])[: budget - 1]
    found = tree_paths(tree)
    assert found.keys() == {path for path, _ in best}
    for path, score in best:
        assert found[path] == pytest.approx(score, abs=TOLERANCE)
    scores = tree.scores[0, : int(tree.num_nodes[0])]
    assert torch.equal(scores, scores.sort(descending=True).values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [1, 2, 5, 13, 31, 64])
def test_fanout_is_the_published_algorithm(seed, width, budget):
    source = marginal(seed)
    tree = FanoutBestFirst(width)(ROOT, source, budget)
    check_invariants(tree, budget)
    nodes = heap_fanout(source, budget, width)
    assert tree.tokens[0].tolist()[: len(nodes)] == [node[0] for node in nodes]
    assert tree.parents[0].tolist()[: len(nodes)] == [node[1] for node in nodes]
    assert int(tree.num_nodes[0]) == len(nodes)


@pytest.mark.parametrize("width", [2, 4])
def test_fanout_skips_children_that_do_not_exist(width):
    source = marginal(0)
    source.log_probs[0, 1, 1:] = float("-inf")
    source.log_probs[0, 2, 2:] = float("-inf")
    for budget in (3, 9, 25):
        tree = FanoutBestFirst(width)(ROOT, source, budget)
        check_invariants(tree, budget)
        assert tree.tokens[0, : int(tree.num_nodes[0])].tolist() == [n[0] for n in heap_fanout(source, budget, width)]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 6), budget=st.integers(1, 40), width=st.integers(1, 7))
def test_best_first_never_expects_less_than_fanout(seed, depth, budget, width):
    for source in (marginal(seed, depth=depth, vocab=7), pairwise(seed, depth=depth)):
        exact = BestFirst()(ROOT, source, budget).expected_acceptance_length()
        published = FanoutBestFirst(width)(ROOT, source, budget).expected_acceptance_length()
        assert float(exact) >= float(published) - TOLERANCE


def test_trees_of_the_public_implementations():
    cases = json.loads((DATA / "tree_cases.json").read_text())
    tensors = load_file(DATA / "tree_cases.safetensors")
    assert len(cases) == 126
    for case in cases:
        logits = tensors[f"case{case['case']}.draft_logits"]
        published = case["source"] == "jetspec_accum_logp"
        expander = FanoutBestFirst(case["width"]) if published else BestFirst()
        tree = expander(ROOT, MarginalSource.from_logits(logits, logits.shape[-1]), case["budget"])
        check_invariants(tree, case["budget"])
        reference = TokenTree.from_parents([case["tokens"]], [case["parents"]])
        assert tree_paths(tree).keys() == tree_paths(reference).keys(), case
        if "cum_logprob" in case:
            torch.testing.assert_close(tree.scores[0], torch.tensor(case["cum_logprob"]), atol=1e-4, rtol=0)
        if "greedy_accept" in case:
            check_acceptance(case, tree, reference, tensors[f"case{case['case']}.b{case['budget']}.target_argmax"])


def check_acceptance(case, tree, reference, target_argmax):
    """The target's tokens are given for the reference's node order; ours may order equal trees otherwise."""
    names = {path: node for node, path in enumerate([(), *tree_paths(reference)])}
    ours = [(), *tree_paths(tree)]
    logits = torch.nn.functional.one_hot(target_argmax.flatten().long(), 1000).float()
    acceptance = GreedyAcceptor()(tree, logits[[names[path] for path in ours]][None])
    path = [names[ours[node]] for node in acceptance.path[0].tolist()]
    assert path == case["greedy_accept"]["path"]
    assert int(acceptance.bonus[0]) == case["greedy_accept"]["bonus"]


@pytest.mark.parametrize(
    "expander", [BestFirst(), FanoutBestFirst(3), Beam(3), Chain(), FixedShape([-1, 0, 0, 1, 1, 2], [0, 0, 1, 0, 2, 0])]
)
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 16])
def test_rows_of_a_batch_equal_single_rows(expander, budget):
    """Also with rows that reach fewer nodes than others."""
    batch = marginal(7, depth=3, vocab=6, batch=4)
    batch.log_probs[1, 1, 1:] = float("-inf")
    batch.log_probs[2, 0, 2:] = float("-inf")
    batch.log_probs[3, 2] = float("-inf")
    roots = torch.tensor([3, 1, 4, 1])
    together = expander(roots, batch, budget)
    check_invariants(together, budget)
    for row in range(4):
        source = MarginalSource(batch.tokens[row : row + 1], batch.log_probs[row : row + 1])
        alone = expander(roots[row : row + 1], source, budget)
        for name in ("tokens", "parents", "depths", "scores", "num_nodes"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name


def test_chain_is_the_beam_of_one_and_follows_the_likeliest_child():
    source = pairwise(1)
    tree = Chain()(ROOT, source, 9)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    best_paths = [max((p for p in all_paths(source, 4) if len(p[0]) == 1), key=lambda item: item[1])[0]]
    assert tree.tokens[0, 1] == best_paths[0][0]
    for length in range(2, 5):
        options = [(p, s) for p, s in all_paths(source, 4) if p[:-1] == best_paths[-1] and len(p) == length]
        best_paths.append(max(options, key=lambda item: item[1])[0])
    assert tuple(tree.tokens[0, 1:].tolist()) == best_paths[-1]
    assert torch.equal(Beam(1)(ROOT, source, 9).tokens, tree.tokens)


def test_beam_keeps_the_best_of_each_level():
    source = pairwise(2)
    tree = Beam(3)(ROOT, source, 10)
    assert tree.depths[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    first_level = sorted((item for item in all_paths(source, 4) if len(item[0]) == 1), key=lambda item: -item[1])
    assert {path for path in tree_paths(tree) if len(path) == 1} == {path for path, _ in first_level[:3]}


def test_equal_scores_go_to_lower_depth_then_parent_then_rank():
    source = MarginalSource(torch.tensor([[[5, 6, 7], [1, 2, 3]]]), torch.zeros(1, 2, 3))
    tree = BestFirst()(ROOT, source, 9)
    assert tree.tokens.tolist() == [[3, 5, 6, 7, 1, 2, 3, 1, 2]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2, 2]]


def test_one_token_stands_once_below_a_parent():
    source = MarginalSource(torch.tensor([[[5, 5, 7, 5], [2, 1, 2, 1]]]), torch.tensor([[[-1.0, -1, -2, -3]] * 2]))
    for expander in (BestFirst(), FanoutBestFirst(4), Beam(4)):
        tree = expander(ROOT, source, 30)
        check_invariants(tree, 30)
        assert tree.tokens[0, : int(tree.num_nodes[0])].tolist().count(5) == 1


def test_prefixes_of_a_best_first_tree_are_best_first_trees():
    source = marginal(3)
    big = BestFirst()(ROOT, source, 30)
    for budget in (1, 2, 9, 17):
        small = BestFirst()(ROOT, source, budget)
        assert torch.equal(big.first(budget).tokens, small.tokens)
        assert torch.equal(big.first(budget).parents, small.parents)


@pytest.mark.parametrize(
    "scoring",
    [EntropyGuided(), Hybrid(0.5), DepthPenalty(0.7), DepthPenalty(-5.0), RankPenalty(1.0), TemperatureCalibrated(2.0)],
)
def test_any_scoring_function_gives_trees(scoring):
    for source in (marginal(4), pairwise(4)):
        for expander in (BestFirst(scoring), FanoutBestFirst(3, scoring), Beam(3, scoring)):
            check_invariants(expander(ROOT, source, 20), 20)


def test_a_users_scoring_function_is_a_plain_function():
    """Priority by rank alone: the likeliest child of everything first, so a chain."""
    tree = BestFirst(lambda candidates: -candidates.ranks.float().expand_as(candidates.log_probs))(ROOT, marginal(0), 5)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


def test_fixed_shape_takes_the_ranks_asked_for_and_leaves_out_what_does_not_exist():
    source = marginal(0)
    shape = FixedShape([-1, 0, 0, 1, 3, 4, 5], [0, 0, 2, 1, 0, 0, 0])
    tree = shape(ROOT, source, 9)
    # The seventh node would be on level 5 of 4, as near a length limit.
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3, 4]]
    assert int(tree.num_nodes[0]) == 6
    assert tree.tokens[0, 1:4].tolist() == [int(source.tokens[0, d, r]) for d, r in ((0, 0), (0, 2), (1, 1))]
    source.log_probs[0, 1, 1] = float("-inf")
    assert shape(ROOT, source, 9).parents[0, :3].tolist() == [-1, 0, 0]
    assert int(shape(ROOT, source, 9).num_nodes[0]) == 3


def test_fixed_shape_in_any_order_of_nodes_follows_the_parents_row():
    source = pairwise(5)
    tree = FixedShape([-1, 0, 1, 0, 3, 2, 3], [0, 1, 0, 0, 1, 2, 0])(ROOT, source, 9)
    check_invariants(tree, 9)
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3, 2, 3]]
    by_rank = {(): 0}
    for node, (parent, rank) in enumerate(zip([0, 1, 0, 3, 2, 3], [1, 0, 0, 1, 2, 0], strict=True), 1):
        above = {n: path for path, n in by_rank.items()}[parent]
        children = sorted(
            (p for p in all_paths(source, 4) if len(p[0]) == len(above) + 1 and p[0][:-1] == above), key=lambda p: -p[1]
        )
        by_rank[children[rank][0]] = node
        assert int(tree.tokens[0, node]) == children[rank][0][-1]
        assert float(tree.scores[0, node]) == pytest.approx(children[rank][1], abs=TOLERANCE)


def test_fixed_shape_leaves_out_a_token_that_stands_twice():
    source = MarginalSource(torch.tensor([[[5, 5, 7], [2, 1, 3]]]), torch.tensor([[[-1.0, -1, -2], [-1, -2, -3]]]))
    tree = FixedShape([-1, 0, 0, 0, 2, 3], [0, 0, 1, 2, 0, 1])(ROOT, source, 9)
    assert tree.tokens.tolist() == [[3, 5, 7, 1, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2, -1, -1]]


def test_bad_input_is_refused():
    source = marginal(0)
    with pytest.raises(ValueError, match="budget must be at least 1"):
        BestFirst()(ROOT, source, 0)
    with pytest.raises(ValueError, match="root_tokens must be int64"):
        BestFirst()(torch.tensor([[3]]), source, 4)
    for make in (FanoutBestFirst, Beam):
        with pytest.raises(ValueError, match="width must be at least 1"):
            make(0)
    with pytest.raises(ValueError, match="rank 5, but the source offers 5 at level 1"):
        FixedShape([-1, 0], [0, 5])(ROOT, source, 9)
    for parents, ranks in (([-1, 0], [0]), ([0], [0]), ([-1, 1], [0, 0]), ([-1, 0, 0], [0, 1, 1]), ([-1, 0], [0, -1])):
        with pytest.raises(ValueError, match=r"parents|ranks|stands twice"):
            FixedShape(parents, ranks)
