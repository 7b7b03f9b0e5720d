"""Expansion: the twin and the heap against growth, the Triton kernel under the interpreter against all, node for node."""

import json
from pathlib import Path

import pytest
import torch
from interpreter import interpreted, run_in_interpreter
from safetensors.torch import load_file

from jetflow import BestFirst, MarginalSource, PairwiseSource
from jetflow.kernels.expand import expand_tree, expand_tree_reference, expansion_sizes, fits, level_sizes
from jetflow.scoring.functions import cumulative_log_prob
from jetflow.trees.growth import grow_best
from jetflow.trees.heap import MOST_NODES, best_from_heap
from jetflow.trees.sources import known_laws

EXPANSIONS = [expand_tree_reference, pytest.param(expand_tree, marks=interpreted)]
FIELDS = ("tokens", "parents", "depths", "scores", "num_nodes")
SIZES = [(1, 1, 2), (1, 9, 4), (3, 4, 5), (4, 1, 9), (5, 3, 64), (7, 8, 33), (2, 5, 200), (6, 8, 4), (15, 32, 128)]
CASES = Path(__file__).parents[1] / "data" / "tree_cases"


def random_laws(shape, seed, kind):
    """Log-probabilities: of random laws; few different ones, exact in float32, with some that do not exist; or none at all."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        return (2 * torch.randn(shape, generator=generator)).log_softmax(-1)
    log_probs = -torch.randint(0, 4, shape, generator=generator).float() / 2
    log_probs[torch.rand(shape, generator=generator) < (0.2 if kind == "tied" else 0.9)] = float("-inf")
    return log_probs


def marginals(batch, depth, width, seed, kind):
    log_probs = random_laws((batch, depth, width), seed, kind).sort(dim=-1, descending=True).values
    # Some tokens stand twice in a law, of which only the first counts.
    tokens = torch.randint(0, 4 * width, log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return MarginalSource(tokens, log_probs)


def pairs(batch, depth, width, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 4 * width, (batch, depth, width), generator=generator)
    table = random_laws((batch, depth - 1, width, width), seed + 1, kind)
    return PairwiseSource(tokens, random_laws((batch, width), seed, kind), table)


def grown(roots, source, budget):
    """The tree as the plain path builds it, level by level."""
    return grow_best(roots, source, cumulative_log_prob, levels=min(source.max_depth, budget - 1), budget=budget)


def assert_grown(expand, source, budget, batch=1):
    """The tables' tree is that of growth, which runs on the CPU."""
    roots = torch.arange(batch) + 3
    tree = grown(roots, source, budget)
    tables = known_laws(source, min(source.max_depth, budget - 1)).tables()
    found = expand(roots, *tables, budget)
    for name, one in zip(FIELDS, found, strict=True):
        assert torch.equal(one, getattr(tree, name)), name


def paths(tokens, parents):
    """The path of every node."""
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


@pytest.mark.parametrize("expand", EXPANSIONS)
@pytest.mark.parametrize("kind", ["random", "tied", "rare"])
@pytest.mark.parametrize("source", [marginals, pairs])
@pytest.mark.parametrize(("depth", "width", "budget"), SIZES)
def test_trees_are_those_of_growth(expand, source, kind, depth, width, budget):
    for seed in range(1 if expand is expand_tree else 5):
        assert_grown(expand, source(2, depth, width, seed, kind), budget, batch=2)


@pytest.mark.parametrize("kind", ["random", "tied", "rare"])
@pytest.mark.parametrize("source", [marginals, pairs])
@pytest.mark.parametrize(("depth", "width", "budget"), SIZES)
def test_trees_of_the_heap_are_those_of_growth(source, kind, depth, width, budget):
    for seed in range(5):
        given, roots = source(2, depth, width, seed, kind), torch.tensor([3, 4])
        tree = grown(roots, given, budget)
        found = best_from_heap(roots, *known_laws(given, min(depth, budget - 1)), budget)
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(tree, name)), (seed, name)


def test_best_first_takes_the_heap_for_few_nodes_with_laws(monkeypatch):
    few, roots = pairs(2, 4, 5, 0, "tied"), torch.tensor([3, 4])
    unknown = marginals(2, 2, 4, 0, "random")
    unknown.log_probs[0, 1, 1] = float("nan")
    wanted = [BestFirst()(roots, few, 20), BestFirst()(roots, unknown, 6), BestFirst()(roots, few, MOST_NODES)]
    assert wanted[1].scores.isnan().any()
    monkeypatch.setattr("jetflow.trees.expanders.grow_best", None)
    assert torch.equal(BestFirst()(roots, few, 20).tokens, wanted[0].tokens)
    for source, budget in ((unknown, 6), (few, MOST_NODES)):
        with pytest.raises(TypeError, match="not callable"):
            BestFirst()(roots, source, budget)


@pytest.mark.parametrize("expand", EXPANSIONS)
@pytest.mark.parametrize("kind", ["random", "tied"])
@pytest.mark.parametrize(
    ("source", "depth", "width", "budget"), [(marginals, 15, 255, 256), (marginals, 15, 16, 128), (pairs, 8, 32, 256)]
)
def test_the_largest_trees_are_those_of_growth(expand, source, kind, depth, width, budget):
    assert_grown(expand, source(1, depth, width, 0, kind), budget)


@pytest.mark.parametrize("expand", EXPANSIONS)
def test_published_trees(expand):
    """The exact trees of the public implementation, as sets of paths."""
    tensors = load_file(CASES.with_suffix(".safetensors"))
    cases = [case for case in json.loads(CASES.with_suffix(".json").read_text()) if case["source"] == "ddtree"]
    checked = 0
    # The interpreter takes a second for each.
    for case in cases[:: 5 if expand is expand_tree else 1]:
        logits = tensors[f"case{case['case']}.draft_logits"]
        source = MarginalSource.from_logits(logits, case["budget"] + 1)
        if case["budget"] > 1:
            tables = known_laws(source, min(source.max_depth, case["budget"] - 1)).tables()
            tokens, parents, *_ = expand(torch.tensor([3]), *tables, case["budget"])
            assert paths(tokens[0].tolist(), parents[0].tolist()) == paths(case["tokens"], case["parents"])
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("expand", EXPANSIONS)
def test_zero_of_either_sign_is_one_score(expand):
    tokens = torch.tensor([[[[4, 7]], [[1, 2]]]])
    log_probs = torch.tensor([[[[0.0, -0.0]], [[-0.0, 0.0]]]])
    found = expand(torch.tensor([3]), tokens, log_probs, None, 5)
    assert found[0].tolist() == [[3, 4, 7, 1, 2]]
    assert found[1].tolist() == [[-1, 0, 0, 1, 1]]


@pytest.mark.parametrize("expand", EXPANSIONS)
def test_a_law_that_is_no_law_shows(expand):
    log_probs = torch.tensor([[[[-1.0, -2.0]], [[float("nan"), float("nan")]]]])
    found = expand(torch.tensor([3]), torch.tensor([[[[4, 7]], [[1, 2]]]]), log_probs, None, 4)
    assert found[3].isnan().any()


def test_levels_keep_what_can_be_in_the_tree():
    assert level_sizes(3, 3, 8) == [1, 3, 6, 5]
    assert expansion_sizes(15, 1, 255, 256) == (256, 256, 2048, 4096)
    assert expansion_sizes(15, 32, 32, 256) == (256, 32, 8192, 4096)
    assert fits(torch.empty(1, 15, 1, 255), 256)
    assert not fits(torch.empty(1, 15, 64, 64), 256)


def test_other_sources_have_no_tables():
    class Odd(MarginalSource):
        """May answer something else."""

    assert known_laws(Odd(torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1)), 1) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"root_tokens": torch.zeros(1)}, r"root_tokens must be int64 \[B\], got torch.float32"),
        ({"root_tokens": torch.zeros(2, dtype=torch.int64)}, r"tokens must be int64 \[2, D, R, K\], got \[1, 2, 1, 3\]"),
        ({"log_probs": torch.zeros(1, 2, 1, 4)}, r"log_probs must be torch.float32 \[1, 2, 1, 3\]"),
        ({"columns": torch.zeros(1, 2, 1, 3, dtype=torch.int64)}, "columns must be given where a depth has several laws"),
        ({"budget": 2}, "budget must be above the 2 levels of tokens, got 2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"root_tokens": torch.zeros(1, dtype=torch.int64), "tokens": torch.zeros(1, 2, 1, 3, dtype=torch.int64)}
    arguments |= {"log_probs": torch.zeros(1, 2, 1, 3), "columns": None, "budget": 4, **change}
    with pytest.raises(ValueError, match=message):
        expand_tree_reference(**arguments)


@interpreted
def test_what_is_too_large_is_refused_by_the_kernel_and_left_to_growth(monkeypatch):
    source = pairs(1, 3, 64, 0, "random")
    plain = grown(torch.tensor([3]), source, 256)
    with pytest.raises(ValueError, match="needs more than 8192 sorted places"):
        expand_tree(torch.tensor([3]), *known_laws(source, 3).tables(), 256)
    monkeypatch.setattr("jetflow.kernels.dispatch.runs_kernels", lambda tensor: True)
    assert torch.equal(BestFirst()(torch.tensor([3]), source, 256).tokens, plain.tokens)


@interpreted
@pytest.mark.parametrize("source", [marginals, pairs])
def test_best_first_runs_the_kernel_where_kernels_run(monkeypatch, source):
    given = source(2, 4, 5, 0, "tied")
    roots = torch.tensor([3, 4])
    plain = grown(roots, given, 20)
    monkeypatch.setattr("jetflow.kernels.dispatch.runs_kernels", lambda tensor: True)
    monkeypatch.setattr("jetflow.trees.expanders.grow_best", None)
    monkeypatch.setattr("jetflow.trees.expanders.best_from_heap", None)
    found = BestFirst()(roots, given, 20)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(plain, name)), name


def test_expansion_in_the_interpreter():
    run_in_interpreter(__file__)
