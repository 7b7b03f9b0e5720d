"""What growth owes to all expanders: the plain rule with ties, any source, no read-back, clear errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow import Beam, BestFirst, Chain, FanoutBestFirst, FixedShape, MarginalSource, PairwiseSource, TokenTree
from jetflow.scoring import DepthPenalty, EntropyGuided, Hybrid, RankPenalty

ROOT = torch.tensor([3])
FIELDS = ("tokens", "parents", "depths", "scores", "num_nodes")
EXPANDERS = [
    BestFirst(),
    FanoutBestFirst(1),
    FanoutBestFirst(3),
    Beam(1),
    Beam(3),
    Chain(),
    FixedShape([-1, 0, 0, 1], [0, 0, 1, 1]),
    BestFirst(EntropyGuided()),
    FanoutBestFirst(3, EntropyGuided()),
    Beam(3, Hybrid(0.5)),
]


class PerParent:
    """Another source's answers, written out for every parent."""

    def __init__(self, source):
        self.source, self.max_depth = source, source.max_depth

    def __call__(self, level, frontier):
        tokens, log_probs = self.source(level, frontier)
        size = frontier.tokens.shape[1]
        return tokens.expand(-1, size, -1).contiguous(), log_probs.expand(-1, size, -1).contiguous()


class PathLaws:
    """A law of its own for every path, as a head that reads the path has; follows `Frontier.parents` to know them."""

    max_depth, vocab = 3, 4

    def law(self, path):
        seed = sum((token + 1) * 10**place for place, token in enumerate(path))
        return (2 * torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)

    def score(self, path):
        return sum(float(self.law(path[:place])[token]) for place, token in enumerate(path))

    def __call__(self, level, frontier):
        slots = zip(frontier.parents[0].tolist(), frontier.tokens[0].tolist(), strict=True)
        self.paths = [()] if level == 1 else [(*self.paths[parent], token) for parent, token in slots]
        expected = torch.tensor([[self.score(path) for path in self.paths]])
        torch.testing.assert_close(frontier.cum_log_probs, expected.float(), atol=1e-5, rtol=0)
        log_probs, tokens = torch.stack([self.law(path) for path in self.paths]).sort(dim=-1, descending=True)
        return tokens[None], log_probs[None]


class Answers:
    """A source with the same answer to every question."""

    max_depth = 4

    def __init__(self, tokens, log_probs):
        self.tokens, self.log_probs = tokens, log_probs

    def __call__(self, level, frontier):
        return self.tokens, self.log_probs


def cumulative(candidates):
    """The default score, but not the function that growth takes its short way for."""
    return candidates.cum_log_probs


def tied_marginals(seed, batch=1, depth=4, width=4):
    """Few different log-probabilities, exact in float32, best first; some are -inf, some tokens stand twice."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.randint(0, 4, (batch, depth, width), generator=generator).float() / 2
    log_probs[torch.rand(log_probs.shape, generator=generator) < 0.2] = float("-inf")
    tokens = torch.randint(0, 2 * width, log_probs.shape, generator=generator)
    return MarginalSource(tokens, log_probs.sort(dim=-1, descending=True).values)


def plain_nodes(source, width=None, change=lambda depth, rank: 0.0):
    """All nodes of the whole tree as (priority, parent, token, score), each level by priority, parent, rank. No cutting.

    `change` is what the scoring function adds to the score.
    """
    levels = [[(float("inf"), None, 3, 0.0)]]
    tables = zip(source.tokens[0].tolist(), source.log_probs[0].tolist(), strict=True)
    for depth, (table, log_probs) in enumerate(tables, 1):
        nodes = []
        for parent, rank in itertools.product(range(len(levels[-1])), range(len(table[:width]))):
            above, _, _, score = levels[-1][parent]
            score += log_probs[rank]
            if score != float("-inf") and table[rank] not in table[:rank]:
                nodes.append((-min(above, score + change(depth, rank)), parent, rank, table[rank], score))
        levels.append([(-negative, parent, token, score) for negative, parent, _, token, score in sorted(nodes)])
    return levels


def plain_order(levels):
    """(depth, place) of every node, best first: ties go to lower depth, then to the lower place in the level."""
    names = [(depth, place) for depth, nodes in enumerate(levels) for place in range(len(nodes))]
    return [names[0], *sorted(names[1:], key=lambda name: (-levels[name[0]][name[1]][0], *name))]


def assert_equal(tree, names, levels):
    where = {name: node for node, name in enumerate(names)}
    assert int(tree.num_nodes[0]) == len(names)
    assert tree.tokens[0].tolist()[: len(names)] == [levels[depth][place][2] for depth, place in names]
    parents = [-1 if depth == 0 else where[depth - 1, levels[depth][place][1]] for depth, place in names]
    assert tree.parents[0].tolist()[: len(names)] == parents
    assert tree.scores[0].tolist()[: len(names)] == [levels[depth][place][3] for depth, place in names]


def paths_of(tree):
    paths = [()]
    for node in range(1, int(tree.num_nodes[0])):
        paths.append((*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])))
    return paths


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 200))
def test_best_first_is_the_plain_rule_also_on_ties(seed, budget):
    source = tied_marginals(seed)
    levels = plain_nodes(source)
    assert_equal(BestFirst()(ROOT, source, budget), plain_order(levels)[:budget], levels)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 200), width=st.integers(1, 5))
def test_fanout_is_the_plain_rule_also_on_ties(seed, budget, width):
    source = tied_marginals(seed)
    levels = plain_nodes(source, width)
    names = [(0, 0)]
    for depth, place in plain_order(levels):
        if depth < source.max_depth:
            # Children of one parent stand in the order of their ranks.
            names += [(depth + 1, child) for child, node in enumerate(levels[depth + 1]) if node[1] == place]
    assert_equal(FanoutBestFirst(width)(ROOT, source, budget), names[:budget], levels)


@pytest.mark.parametrize(
    ("scoring", "change"),
    [
        (DepthPenalty(0.5), lambda depth, rank: -0.5 * depth),
        (DepthPenalty(-0.75), lambda depth, rank: 0.75 * depth),
        (RankPenalty(0.25), lambda depth, rank: -0.25 * rank),
        (lambda candidates: candidates.cum_log_probs + candidates.ranks, lambda depth, rank: rank),
    ],
    ids=["shallow", "deep", "narrow", "odd"],
)
def test_other_scores_follow_the_plain_rule_with_children_lowered_to_their_parents(scoring, change):
    for seed in range(20):
        source = tied_marginals(seed)
        levels = plain_nodes(source, change=change)
        for budget in (2, 5, 17, 60):
            assert_equal(BestFirst(scoring)(ROOT, source, budget), plain_order(levels)[:budget], levels)


@pytest.mark.parametrize("budget", [2, 9, 30, 200])
def test_sources_can_follow_the_path(budget):
    source = PathLaws()
    every = [p for size in (1, 2, 3) for p in itertools.product(range(source.vocab), repeat=size)]
    best = sorted(every, key=lambda path: -source.score(path))[: budget - 1]
    shape = FixedShape([-1, 0, 0, 1, 2, 2, 5, 4], [0, 2, 0, 1, 0, 3, 1, 0])
    for expander in (BestFirst(), BestFirst(RankPenalty(1.0)), FanoutBestFirst(3), Beam(3), Chain(), shape):
        tree = expander(ROOT, source, budget)
        paths = paths_of(tree)
        expected = torch.tensor([source.score(path) for path in paths])
        torch.testing.assert_close(tree.scores[0, : len(paths)], expected.float(), atol=1e-5, rtol=0)
    assert set(paths_of(BestFirst()(ROOT, source, budget))) == {(), *best}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 300), width=st.integers(1, 40))
def test_the_short_way_for_shared_laws_changes_nothing(seed, budget, width):
    """A law for all parents, the same written out for each, and a scoring function of the user's: one tree."""
    source = tied_marginals(seed, batch=2, depth=5, width=width)
    roots = torch.tensor([3, 4])
    for make in (BestFirst, lambda *scoring: FanoutBestFirst(4, *scoring), lambda *scoring: Beam(7, *scoring)):
        short = make()(roots, source, budget)
        for other in (make()(roots, PerParent(source), budget), make(cumulative)(roots, source, budget)):
            for name in FIELDS:
                assert torch.equal(getattr(short, name), getattr(other, name)), name


@pytest.mark.parametrize("expander", EXPANDERS)
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 7), (7, 1), (5, 3)])
def test_stars_chains_and_small_sources_give_trees(expander, depth, width):
    """Also budgets far above what is reachable."""
    source = MarginalSource.from_logits(torch.randn(1, depth, width, generator=torch.Generator().manual_seed(0)), 99)
    if isinstance(expander, FixedShape):
        expander = FixedShape([-1, 0], [0, 0])
    for budget in (1, 2, 3, 4, 5, 7, 8, 400):
        tree = expander(ROOT, source, budget)
        count = int(tree.num_nodes[0])
        assert 1 <= count <= min(budget, sum(width**level for level in range(depth + 1)))
        TokenTree.from_parents(tree.tokens, tree.parents, tree.scores, num_nodes=[count])
    if type(expander) is BestFirst:
        assert count == min(400, sum(width**level for level in range(depth + 1)))


@pytest.mark.parametrize("expander", EXPANDERS)
def test_random_trees_keep_the_rules_and_come_out_the_same_twice(expander):
    for seed in range(40):
        source = tied_marginals(seed)
        if isinstance(expander, FixedShape):
            source = MarginalSource(source.tokens[..., :3], source.log_probs[..., :3])
        tree, again = expander(ROOT, source, 12), expander(ROOT, source, 12)
        for name in FIELDS:
            assert torch.equal(getattr(tree, name), getattr(again, name)), name
        count = int(tree.num_nodes[0])
        # The checked way in raises on late parents, repeated children and scores above the parent's.
        checked = TokenTree.from_parents(tree.tokens, tree.parents, tree.scores, num_nodes=[count])
        assert count <= 12
        assert torch.equal(checked.depths, tree.depths)
        assert tree.scores[0, :count].isfinite().all()


@pytest.mark.parametrize("expander", [BestFirst(), FanoutBestFirst(7), Beam(7)])
def test_only_tokens_that_exist_are_in_a_tree(expander):
    logits = torch.full((1, 2, 30), float("-inf"))
    logits[0, :, [4, 9, 21]] = torch.tensor([1.0, 2.0, 0.0])
    tree = expander(ROOT, MarginalSource.from_logits(logits, 7), 50)
    assert int(tree.num_nodes[0]) == 1 + 3 + (7 if isinstance(expander, Beam) else 9)
    assert set(tree.tokens[0, 1 : int(tree.num_nodes[0])].tolist()) == {4, 9, 21}


def test_levels_may_offer_different_numbers_of_children():
    class Narrowing:
        max_depth = 3

        def __call__(self, level, frontier):
            width = (4, 2, 3)[level - 1]
            return torch.arange(width).expand(1, 1, -1), -torch.arange(1.0, width + 1).expand(1, 1, -1)

    for source in (Narrowing(), PerParent(Narrowing())):
        for expander in (BestFirst(), FanoutBestFirst(4)):
            tree = expander(ROOT, source, 99)
            assert [int((tree.depths[0] == depth).sum()) for depth in (1, 2, 3)] == [4, 8, 24]
            TokenTree.from_parents(tree.tokens, tree.parents, tree.scores, num_nodes=tree.num_nodes)


def test_a_law_that_rounding_put_above_one_still_gives_a_tree():
    certain = torch.tensor([[[1e-6, -3.0]] * 4])
    for source in (
        MarginalSource(torch.tensor([[[1, 2]] * 4]), certain),
        PerParent(MarginalSource(torch.tensor([[[1, 2]] * 4]), certain)),
    ):
        for expander in EXPANDERS:
            tree = expander(ROOT, source, 12)
            TokenTree.from_parents(tree.tokens, tree.parents, tree.scores, num_nodes=tree.num_nodes)


@pytest.mark.parametrize("expander", EXPANDERS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_shows_in_the_scores(expander, sign):
    """What a GPU, which is not stopped to look, hands on from logits that are NaN."""
    nan = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
    log_probs = torch.full((1, 3, 40), -1.0)
    log_probs[0, 1] = nan
    source = MarginalSource(torch.arange(40).expand(1, 3, -1), log_probs)
    assert expander(ROOT, source, 200).scores.isnan().any()
    assert expander(ROOT, PerParent(source), 200).scores.isnan().any()


@pytest.mark.parametrize("expander", [*EXPANDERS, BestFirst(cumulative)])
@pytest.mark.parametrize("budget", [1, 5, 300])
def test_nothing_is_read_back_from_the_device(expander, budget):
    """Tensors of the device "meta" hold no values, so that reading one raises."""
    roots = torch.zeros(2, dtype=torch.int64, device="meta")
    marginal = MarginalSource.from_logits(torch.empty(2, 6, 500, device="meta"), 5)
    tokens = torch.empty(2, 6, 5, dtype=torch.int64, device="meta")
    table = torch.empty(2, 5, 5, 5, device="meta")
    for source in (marginal, PairwiseSource(tokens, torch.empty(2, 5, device="meta"), table)):
        tree = expander(roots, source, budget)
        assert tree.scores.device.type == "meta"
        assert tree.tokens.shape[1] <= budget


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("expander", EXPANDERS)
def test_trees_on_a_gpu_equal_those_on_the_cpu_without_a_wait(expander):
    source = tied_marginals(0, batch=3, depth=6, width=40)
    roots = torch.tensor([3, 4, 5])
    there = MarginalSource(source.tokens.cuda(), source.log_probs.cuda())
    roots_there = roots.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree = expander(roots_there, there, 200)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = expander(roots, source, 200)
    for name in FIELDS:
        assert torch.equal(getattr(tree, name).cpu(), getattr(expected, name)), name


def test_wrong_answers_are_refused():
    tokens, log_probs = torch.tensor([[[1, 2]]]), torch.tensor([[[-1.0, -2.0]]])
    wrong = [
        (tokens, log_probs[..., :1]),
        (tokens[0], log_probs[0]),
        (tokens.expand(2, -1, -1), log_probs.expand(2, -1, -1)),
        (tokens.expand(-1, 3, -1), log_probs.expand(-1, 3, -1)),
    ]
    for answer in wrong:
        for expander in (BestFirst(), FixedShape([-1, 0], [0, 0])):
            with pytest.raises(ValueError, match="a source must answer 1 rows of 1 parents"):
                expander(ROOT, Answers(*answer), 9)
    with pytest.raises(ValueError, match="root_tokens on cpu need a source on the same device, got tokens on meta"):
        BestFirst()(ROOT, Answers(tokens.to("meta"), log_probs.to("meta")), 9)
    source = Answers(tokens, log_probs)
    with pytest.raises(ValueError, match=r"scoring must return priorities \[B, F, K\] = \[1, 1, 2\], got \[2\]"):
        BestFirst(lambda candidates: -candidates.ranks)(ROOT, source, 9)
    with pytest.raises(ValueError, match="scoring must not return NaN for candidates that exist, it did at level 1"):
        BestFirst(lambda candidates: candidates.log_probs * float("nan"))(ROOT, source, 9)
