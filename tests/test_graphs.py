"""Recorded steps: buckets and static memory on their own, and whole decodes with a stand-in for CUDA graphs."""

import pytest
import torch
from conftest import VOCAB_SIZE, make_model, plain_greedy
from interpreter import interpreted, run_in_interpreter
from tape import record
from test_decoding import ScriptedDrafter

from jetflow import (
    Acceptance,
    BlockDraftHead,
    DraftHeadConfig,
    GraphSettings,
    ParallelDrafter,
    SpeculativeDecoder,
    Target,
    TokenTree,
    TreeVerifier,
)
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.graphs import RecordedSteps
from jetflow.heads.window import WindowedLayers

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
# The interpreter and PyTorch's products of other sizes round otherwise.
TOLERANCE = 1e-4


WINDOWED = {"causal": False, "window": WindowedLayers(6, (0,))}


def small_graphs(**changes):
    return GraphSettings(**{"max_tokens": 64, "buckets": (1, 4, 8), "first_prefix": 16, "capture": record, **changes})


def make_head(target, **changes):
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "block_size": 6, "mask_token_id": 60, "taps": (0, 1, 3), **changes}
    head = BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes)).eval()
    if head.correction is not None:
        torch.nn.init.normal_(head.correction.up.weight, std=0.3)
    return head


def test_sizes_go_to_the_next_bucket():
    settings = small_graphs()
    assert [settings.bucket(nodes) for nodes in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    assert [settings.prefix_bucket(longest) for longest in (0, 16, 17, 33)] == [16, 16, 32, 64]
    with pytest.raises(ValueError, match=r"a tree of 9 nodes is above the largest of buckets=\[1, 4, 8\]"):
        settings.bucket(9)
    with pytest.raises(ValueError, match="a row needs room for 65 tokens, but graphs keep max_tokens=64"):
        settings.check_room(65)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"first_prefix": 0}, "first_prefix must be at least 1, got 0"),
        ({"buckets": ()}, r"buckets must be rising numbers in \[1, 1024\], got \[\]"),
        ({"buckets": (4, 4)}, r"got \[4, 4\]"),
        ({"buckets": (4, 2048)}, r"got \[4, 2048\]"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small_graphs(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TreeVerifier(Target(make_model("qwen3")), graphs=small_graphs()),
            "graphs need a target with attention='triton'",
        ),
        (
            lambda: TreeVerifier(Target(make_model("qwen3"), attention="triton"), graphs=GraphSettings(64)),
            "graphs need a CUDA device, got cpu",
        ),
        (
            lambda: ParallelDrafter(
                *(make_head(Target(make_model("qwen3"))), Target(make_model("qwen3"))), graphs=GraphSettings(64)
            ),
            "graphs need a CUDA device, got cpu",
        ),
        (
            lambda: SpeculativeDecoder(
                Target(make_model("qwen3"), attention="triton"), PromptLookupDrafter(), budget=9, graphs=small_graphs()
            ),
            "a tree of 9 nodes is above the largest of buckets",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(make, message):
    pytest.importorskip("triton", reason="kernels need triton")
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_are_read_on_the_host_are_refused(kind):
    pytest.importorskip("triton", reason="kernels need triton")
    model = make_model("qwen3")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    with pytest.raises(ValueError, match=f"graphs do not go with rope_type='{kind}'"):
        TreeVerifier(Target(model, attention="triton"), graphs=small_graphs())


def test_experts_that_are_looped_over_are_refused():
    pytest.importorskip("triton", reason="kernels need triton")
    model = make_model("qwen3_moe")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="graphs do not go with experts that are looped over"):
        TreeVerifier(Target(model, attention="triton"), graphs=small_graphs())


def test_a_step_is_recorded_once_for_each_key_and_replayed_on_its_own_memory():
    calls, memory = [], torch.zeros(8)

    def step(starts, values):
        calls.append(len(values))
        memory.index_copy_(0, starts + torch.arange(len(values)), values * 2)
        return (memory.cumsum(0),)

    steps = RecordedSteps(small_graphs())
    for starts, values in (([0], [1.0, 2.0]), ([3], [5.0, 6.0]), ([7], [1.0]), ([1], [7.0, 8.0])):
        expected = memory.clone()
        expected[starts[0] : starts[0] + len(values)] = torch.tensor(values) * 2
        (out,) = steps(len(values), (torch.tensor(starts), torch.tensor(values)), step)
        assert torch.equal(out, expected.cumsum(0))
        assert torch.equal(memory, expected)
    assert calls == [2, 1]
    assert len(steps) == 2
    steps.clear()
    assert len(steps) == 0


@pytest.mark.parametrize(
    "read", [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x[: int(x[0])]]
)
def test_the_stand_in_refuses_what_a_graph_could_not_hold(read):
    with pytest.raises(RuntimeError, match="needs the host"):
        record(lambda: (read(torch.ones(2)),))


@interpreted
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mistral_sliding"])
def test_text_with_recorded_passes_is_that_of_plain_decoding(name, page_size):
    model = make_model(name)
    expected = plain_greedy(model, PROMPT, 14)
    target = Target(model, attention="triton")
    pool = None if page_size is None else target.new_page_pool(20, page_size)
    drafter = ScriptedDrafter("second_child", expected, len(PROMPT))
    decoder = SpeculativeDecoder(target, drafter, budget=7, pages=pool, graphs=small_graphs())
    # The second generation replays what the first has recorded.
    for count in (14, 6):
        assert decoder.generate(PROMPT, max_new_tokens=count).token_ids == expected[:count]
    # One bucket of nodes, two of prefixes.
    assert len(decoder._verifier._recorded) == 2
    assert pool is None or pool.num_free == 20


@interpreted
@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"correction": "gated", "correction_rank": 4}, WINDOWED])
def test_recorded_drafts_are_the_plain_ones(changes):
    target = Target(make_model("qwen3"))
    head = make_head(target, **changes)
    results = []
    for graphs in (None, small_graphs()):
        drafter = ParallelDrafter(head, target, graphs=graphs)
        decoder = SpeculativeDecoder(target, drafter, budget=7)
        results += [decoder.generate(PROMPT[:length], max_new_tokens=14) for length in (10, 4)]
    for plain, fast in zip(results[:2], results[2:], strict=True):
        assert fast.token_ids == plain.token_ids
        assert [(one.num_nodes, one.num_kept) for one in fast.rounds] == [(one.num_nodes, one.num_kept) for one in plain.rounds]
    assert 1 <= len(drafter._recorded) <= 3


@interpreted
@torch.no_grad()
def test_recorded_drafts_of_a_batch():
    target = Target(make_model("qwen3"))
    head = make_head(target)
    drafters = [ParallelDrafter(head, target, graphs=graphs) for graphs in (None, small_graphs())]
    generator = torch.Generator().manual_seed(0)
    for drafter in drafters:
        drafter.reset(3)
    for _ in range(4):
        features = torch.randn(3, 7, 96, generator=generator)
        counts, roots = torch.randint(1, 8, (3,), generator=generator), torch.randint(VOCAB_SIZE, (3,), generator=generator)
        for drafter in drafters:
            drafter.observe(roots[:, None].expand(-1, 7), features, counts)
        plain, fast = drafters[0]._run(roots, 5), drafters[1]._replay(drafters[1]._recorded, roots, 5)
        for one, other in zip(plain, fast, strict=True):
            torch.testing.assert_close(other, one, atol=TOLERANCE, rtol=0)
    with pytest.raises(ValueError, match="graphs keep max_tokens=64"):
        drafters[1].observe(roots[:, None].expand(-1, 60), torch.randn(3, 60, 96), counts)


def random_tree(rows, nodes, generator):
    parents = [[-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, nodes))] for _ in range(rows)]
    tokens = [torch.randperm(VOCAB_SIZE, generator=generator)[:nodes].tolist() for _ in range(rows)]
    return TokenTree.from_parents(tokens, parents)


@interpreted
@pytest.mark.parametrize("page_size", [None, 4])
def test_random_trees_of_a_ragged_batch_cross_buckets(page_size):
    """Node counts over three buckets, prefixes over two; then a row leaves and recordings are made anew."""
    target = Target(make_model("qwen3"), attention="triton")
    generator = torch.Generator().manual_seed(0)
    pools = [None if page_size is None else target.new_page_pool(60, page_size) for _ in range(2)]
    plain = TreeVerifier(target, taps=(1,), pages=pools[0])
    fast = TreeVerifier(target, taps=(1,), pages=pools[1], graphs=small_graphs())
    prompts, lengths = torch.randint(VOCAB_SIZE, (3, 14), generator=generator), torch.tensor([14, 4, 1])
    for verifier in (plain, fast):
        verifier.prefill(prompts, lengths)
    rows = 3
    for turn, nodes in enumerate((3, 8, 1, 6, 7, 2)):
        if turn == 4:
            rows = 2
            for verifier in (plain, fast):
                verifier.keep_rows([2, 0])
        tree = random_tree(rows, nodes, generator)
        outputs = [verifier.verify(tree) for verifier in (plain, fast)]
        for one, other in zip(*outputs, strict=True):
            torch.testing.assert_close(other, one, atol=TOLERANCE, rtol=0)
        # The path to the last node.
        paths = []
        for row in range(rows):
            path = [nodes - 1]
            while path[0]:
                path.insert(0, int(tree.parents[row, path[0]]))
            paths.append(path)
        longest = max(map(len, paths))
        padded = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths])
        accepted = torch.tensor([len(path) - 1 for path in paths])
        for verifier in (plain, fast):
            verifier.commit(Acceptance(padded, accepted, torch.zeros(rows, dtype=torch.int64)))
        assert plain.cache.lengths == fast.cache.lengths


@interpreted
def test_there_must_be_room_for_the_whole_request():
    target = Target(make_model("qwen3"), attention="triton")
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, graphs=small_graphs(max_tokens=30))
    with pytest.raises(ValueError, match="a row needs room for 32 tokens, but graphs keep max_tokens=30"):
        decoder.generate(PROMPT, max_new_tokens=14)
    verifier = TreeVerifier(target, graphs=small_graphs(max_tokens=12))
    with pytest.raises(ValueError, match="a row needs room for 13 tokens"):
        verifier.prefill(torch.ones(1, 13, dtype=torch.int64), torch.tensor([13]))
    verifier.prefill(torch.tensor([PROMPT]), torch.tensor([10]))
    with pytest.raises(ValueError, match="a row needs room for 14 tokens"):
        verifier.verify(random_tree(1, 3, torch.Generator().manual_seed(0)))


def test_recordings_in_the_interpreter():
    run_in_interpreter(__file__, "-k", "not in_the_interpreter")
