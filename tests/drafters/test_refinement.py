"""Further passes over the nodes of a tree: laws of real paths, honest probabilities, and the target's own text."""

import itertools
import json

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import (
    AcceptanceTable,
    BestFirst,
    BlockDraftHead,
    ChildSampling,
    DraftHeadConfig,
    FixedShape,
    Frontier,
    ParallelDrafter,
    SpeculativeDecoder,
    Target,
    TokenTree,
    TraversalVerification,
    load_head,
    save_head,
)
from jetflow.protocols import DraftContext
from jetflow.trees.refined import RefinedSource
from jetflow.trees.sources import MarginalSource

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
LENGTHS = [10, 6]
ROOTS = torch.tensor([7, 11])
DEPTH = 4
KINDS = [None, "gated", "recurrent"]
# float32 sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def target():
    return Target(make_model("qwen3"))


def make_head(target, kind=None, *, refinement=True):
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(
        target.config, num_layers=2, block_size=DEPTH + 1, mask_token_id=60, taps=(0, 1, 3), correction=kind,
        correction_rank=128 if kind is None else 8, refinement=refinement,
    )  # fmt: skip
    head = BlockDraftHead(config).eval()
    if kind is not None:
        for weight in head.correction.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return head


def behind_prompt(head, target, rows=(0, 1), **options):
    """A drafter with the contexts of these rows, which differ in length."""
    drafter = ParallelDrafter(head, target, **options)
    ids = torch.tensor([PROMPT, PROMPT[::-1]])[list(rows)]
    features, _ = target.features(ids, drafter.taps)
    drafter.reset(len(rows))
    drafter.observe(ids, features, torch.tensor(LENGTHS)[list(rows)])
    return drafter


def context_of(rows=(0, 1), generator=None):
    roots, lengths = ROOTS[list(rows)], torch.tensor(LENGTHS)[list(rows)]
    return DraftContext(roots, lengths, [[]] * len(rows), max_depth=99, generator=generator)


def path_of(tree, row, node):
    path = []
    while node >= 0:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path


def law_behind(head, target, row, path):
    """Log-probabilities [V] of the token behind a path of real tokens, computed alone: the path is the whole block."""
    drafter = behind_prompt(head, target, [row])
    size = len(path)
    states = head.draft(target.embed(torch.tensor([path])), drafter._cache, torch.ones(size, size, dtype=torch.bool).tril())
    state = states[0, -1]
    if head.config.corrects_filled:
        state = head.correction(state[None], target.embed(torch.tensor([path[-1]])))[0]
    return target.lm_head(state).log_softmax(-1)


@torch.no_grad()
def test_a_node_gets_the_law_of_its_own_path(target):
    head = make_head(target)
    drafter = behind_prompt(head, target, passes=2)
    tree = BestFirst()(ROOTS, drafter._source(context_of(), DEPTH, 12), 12)
    assert not torch.equal(tree.parents[0], tree.parents[1])
    laws = target.lm_head(drafter._read(tree)).log_softmax(-1)
    for row in range(2):
        for node in range(int(tree.num_nodes[row])):
            expected = law_behind(head, target, row, path_of(tree, row, node))
            torch.testing.assert_close(laws[row, node], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [1, 2, 3])
@torch.no_grad()
def test_the_tree_is_the_best_one_by_the_laws_of_real_paths(target, kind, passes):
    """Brute force over all paths of a small vocabulary: nodes of the tree before are refined, others are not."""
    head, vocabulary, budget = make_head(target, kind), torch.tensor([3, 9, 17, 22, 40]), 10
    options = {"vocabulary": vocabulary, "width": 5}
    for row in range(2):
        drafter = behind_prompt(head, target, [row], passes=passes, **options)
        found = drafter.propose(context_of([row]), budget)
        first = behind_prompt(head, target, [row], **options)
        plain = first._source(context_of([row]), DEPTH, budget)
        laws = {path: law for level in range(1, DEPTH + 1) for path, law in laws_of_level(plain, row, level, vocabulary)}
        for _ in range(passes - 1):
            for path in best_paths(laws, vocabulary, budget):
                logits = law_behind(head, target, row, [int(ROOTS[row]), *path])[vocabulary]
                laws[path] = dict(zip(vocabulary.tolist(), logits.log_softmax(-1).tolist(), strict=True))
        expected = best_paths(laws, vocabulary, budget)
        assert {tuple(path_of(found, 0, node)[1:]) for node in range(budget)} == expected.keys()
        for node in range(budget):
            score = float(found.scores[0, node])
            assert score == pytest.approx(expected[tuple(path_of(found, 0, node)[1:])], abs=1e-4)


def laws_of_level(source, row, level, vocabulary):
    """The laws of all paths of `level - 1` tokens by a source, asked for one path at a time."""
    for path in itertools.product(vocabulary.tolist(), repeat=level - 1):
        tokens = [int(ROOTS[row]), *path]
        for step, token in enumerate(tokens, 1):
            frontier = Frontier(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))
            answer = source(step, frontier)
        yield path, dict(zip(answer[0][0, 0].tolist(), answer[1][0, 0].tolist(), strict=True))


def best_paths(laws, vocabulary, budget):
    """The likeliest paths and their log-probabilities, the root's empty one included."""
    scores = {(): 0.0}
    for length in range(1, DEPTH + 1):
        for path in itertools.product(vocabulary.tolist(), repeat=length):
            scores[path] = scores[path[:-1]] + laws[path[:-1]][path[-1]]
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:budget])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_children_never_sum_to_more_than_one(target, kind):
    source = behind_prompt(make_head(target, kind), target, passes=3, width=6)._source(context_of(), DEPTH, 12)
    frontier = Frontier(ROOTS[:, None], torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))
    for level in range(1, DEPTH + 1):
        tokens, log_probs = source(level, frontier)
        assert tokens.shape == (2, frontier.tokens.shape[1], 6)
        assert (log_probs.exp().sum(-1) <= 1 + TOLERANCE).all()
        assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()
        slots = torch.arange(frontier.tokens.shape[1]).repeat_interleave(6).expand(2, -1)
        frontier = Frontier(tokens.flatten(1), slots, log_probs.flatten(1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_equal_single_rows(target, kind):
    head = make_head(target, kind)
    together = behind_prompt(head, target, passes=2).propose(context_of(), 12)
    for row in range(2):
        alone = behind_prompt(head, target, [row], passes=2).propose(context_of([row]), 12)
        for name in ("tokens", "parents", "depths", "num_nodes"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_stays_the_targets(target, kind):
    head = make_head(target, kind)
    for options in ({"passes": 2}, {"passes": 3, "refine_nodes": 4}, {"passes": 2, "vocabulary": torch.arange(1, 40)}):
        for expander in (BestFirst(), FixedShape([-1, 0, 0, 1], [0, 0, 1, 0])):
            drafter = ParallelDrafter(head, target, expander, **options)
            for budget in (1, 2, 9):
                result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=20)
                assert result.token_ids == plain_greedy(target.model, PROMPT, 20)


def test_drawn_children_record_the_refined_laws(target):
    head, sampling = make_head(target), ChildSampling()
    expander = BestFirst(AcceptanceTable())
    options = {"passes": 2, "width": 61, "sampling": sampling, "refine_nodes": 40}
    drafter = behind_prompt(head, target, expander=expander, **options)
    tree = drafter.propose(context_of(generator=torch.Generator().manual_seed(0)), 9)
    refined = 0
    plain = BestFirst()(ROOTS, behind_prompt(head, target, width=61)._source(context_of(), DEPTH, 40), 40)
    for row in range(2):
        read = [path_of(plain, row, node) for node in range(40)]
        for node in range(int(tree.num_nodes[row])):
            path = path_of(tree, row, node)
            if not bool((tree.parents[row] == node).any()) or path not in read:
                continue
            refined += 1
            with torch.no_grad():
                expected = law_behind(head, target, row, path).exp()
            law = torch.zeros(61).index_add(0, tree.laws.tokens[row, node], tree.laws.probs[row, node])
            torch.testing.assert_close(law, expected, atol=TOLERANCE, rtol=0)
    assert refined >= 4
    decoder = SpeculativeDecoder(target, ParallelDrafter(head, target, expander, **options), TraversalVerification(), budget=9)
    assert len(decoder.generate(PROMPT, max_new_tokens=12, seed=0, eos_token_id=[]).token_ids) == 12


def test_a_node_is_known_by_its_whole_path():
    """Token 5 stands under both children of the root; only the one under 1 is in the tree."""
    tree = TokenTree.from_parents([[3, 1, 2, 5]], [[-1, 0, 0, 1]])
    plain = MarginalSource(torch.tensor([[[1, 2, 4], [5, 6, 7], [8, 9, 10]]]), torch.full((1, 3, 3), -2.0))
    tokens = torch.tensor([[[1, 2], [5, 6], [6, 5], [20, 21]]])
    source = RefinedSource(
        tree, (tokens, torch.full((1, 4, 2), -1.0)), MarginalSource(plain.tokens[..., :1], plain.log_probs[..., :1])
    )
    zeros = torch.zeros(1, 1)
    source(1, Frontier(torch.tensor([[3]]), zeros.long(), zeros))
    # The third is outside the tree.
    got, _ = source(2, Frontier(torch.tensor([[2, 1, 4]]), torch.zeros(1, 3).long(), torch.zeros(1, 3)))
    assert got.tolist() == [[[6, 5], [5, 6], [5, 0]]]
    got, log_probs = source(3, Frontier(torch.tensor([[5, 5, 5]]), torch.tensor([[0, 1, 2]]), torch.zeros(1, 3)))
    assert got.tolist() == [[[8, 0], [20, 21], [8, 0]]]
    assert log_probs.tolist() == [[[-2.0, -torch.inf], [-1.0, -1.0], [-2.0, -torch.inf]]]


def test_what_does_not_fit_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="passes=2 needs a head that was trained with refinement=True"):
        ParallelDrafter(make_head(target, refinement=False), target, passes=2)
    for options, message in (
        ({"passes": 0}, "passes must be at least 1, got 0"),
        ({"passes": 2, "refine_nodes": 0}, "refine_nodes must be at least 1, got 0"),
        ({"refine_nodes": 4}, "refine_nodes=4 needs passes of at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelDrafter(make_head(target), target, **options)
    tree = TokenTree.from_parents([[3, 1]], [[-1, 0]])
    with pytest.raises(ValueError, match=r"laws must be two tensors \[B, N, K\] for a tree of"):
        RefinedSource(tree, (torch.zeros(1, 3, 2).long(), torch.zeros(1, 3, 2)), None)


def test_the_config_keeps_whether_a_head_refines(target, tmp_path):
    for refinement in (False, True):
        head = make_head(target, refinement=refinement)
        save_head(head, tmp_path / str(refinement))
        config = json.loads((tmp_path / str(refinement) / "config.json").read_text())
        assert config.get("jetflow_refinement", False) is refinement
        assert load_head(tmp_path / str(refinement)).config == head.config
