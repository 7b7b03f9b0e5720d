"""Commit, acceptance walk and top tokens: the twins against loops, the Triton kernels under the interpreter against them."""

import pytest
import torch
from conftest import make_model
from interpreter import interpreted, run_in_interpreter

from jetflow import BlockDraftHead, DraftHeadConfig, GreedyAcceptor, ParallelDrafter, SpeculativeDecoder, Target, TokenTree
from jetflow.kernels.commit import commit_path, commit_path_reference
from jetflow.kernels.top_tokens import top_tokens, top_tokens_reference
from jetflow.kernels.walk import accept_walk, accept_walk_reference

# The twin everywhere, the kernel in the process that has the interpreter.
COMMITS = [commit_path_reference, pytest.param(commit_path, marks=interpreted)]
WALKS = [accept_walk_reference, pytest.param(accept_walk, marks=interpreted)]
TOPS = [top_tokens_reference, pytest.param(top_tokens, marks=interpreted)]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_commit_moves_the_path_and_nothing_else(commit, page_size, head_dim):
    generator = torch.Generator().manual_seed(0)
    path = torch.tensor([[0, 1, 3, 6], [0, 2, 3, 3], [0, 0, 0, 0]])
    starts, counts = torch.tensor([5, 0, 9], dtype=torch.int32), torch.tensor([4, 3, 1], dtype=torch.int32)
    slots = torch.randn(6, 3, 2, 17, head_dim, generator=generator)
    expected = slots.clone()
    for row in range(3):
        for place in range(int(counts[row])):
            expected[:, row, :, int(starts[row]) + place] = slots[:, row, :, int(starts[row] + path[row, place])]
    if page_size is None:
        # Strides of a larger cache.
        memory = torch.full((6, 3, 2, 40, head_dim), torch.nan)[..., :17, :]
        memory.copy_(slots)
        commit(memory, path, starts, counts)
        assert torch.equal(memory, expected)
        return
    per_row = -(-17 // page_size)
    table = torch.randperm(3 * per_row, generator=generator).view(3, per_row).int()
    memory = torch.full((6, 3 * per_row, page_size, 2, head_dim), torch.nan)
    for row in range(3):
        for slot in range(17):
            memory[:, table[row, slot // page_size], slot % page_size] = slots[:, row, :, slot]
    commit(memory, path, starts, counts, block_table=table)
    for row in range(3):
        for slot in range(17):
            assert torch.equal(memory[:, table[row, slot // page_size], slot % page_size], expected[:, row, :, slot])


def random_trees(rows, nodes, vocab, generator):
    trees = []
    for _ in range(rows):
        tokens, parents, used = [0], [-1], set()
        while len(tokens) < nodes:
            parent = int(torch.randint(len(tokens), (1,), generator=generator))
            token = int(torch.randint(vocab, (1,), generator=generator))
            if (parent, token) not in used:
                used.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        trees.append((tokens, parents))
    counts = torch.randint(1, nodes + 1, (rows,), generator=generator)
    return TokenTree.from_parents([t for t, _ in trees], [p for _, p in trees], num_nodes=counts)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("nodes", [1, 2, 15, 70])
def test_walks_follow_the_targets_choice(walk, nodes):
    generator = torch.Generator().manual_seed(nodes)
    tree = random_trees(6, nodes, 4 if nodes < 70 else 30, generator)
    logits = torch.randn(6, nodes, 30, generator=generator)
    if nodes < 70:
        logits[..., 4:] = -5.0
    logits[2, 0] = torch.nan
    expected = GreedyAcceptor()(tree, logits)
    values, tokens = logits.max(-1)
    chosen = torch.where(values > -torch.inf, tokens, -1)
    depth = int(tree.depths.max())
    path, accepted, bonus = walk(tree.tokens, tree.parents, tree.num_nodes, chosen, depth)
    assert torch.equal(accepted, expected.num_accepted)
    assert torch.equal(bonus, expected.bonus)
    assert path.shape == (6, depth + 1)
    assert torch.equal(path[:, : expected.path.shape[1]], expected.path)
    assert (path[:, expected.path.shape[1] :] == path[:, -1:]).all()


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "count"), [(7, 7), (100, 1), (2048, 5), (5000, 33)])
def test_top_tokens_are_the_likeliest_with_ties_to_the_lower_id(top, dtype, vocab, count):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator).to(dtype)
    logits[1] = (logits[1] * 2).round()
    if vocab > 2048:
        # Fewer tokens than are asked for.
        logits[2, 20:] = -torch.inf
    tokens, log_probs = top(logits, count)
    law = logits.double().log_softmax(-1)
    for row in range(3):
        order = sorted(range(vocab), key=lambda token: (-float(logits[row, token]), token))[:count]
        assert tokens[row].tolist() == order
        torch.testing.assert_close(log_probs[row].double(), law[row, order], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_tokens_reference(torch.zeros(2, 9), 10), r"count must be in \[1, 9\], got 10"),
        (lambda: top_tokens_reference(torch.zeros(9, 2).T, 1), "logits must be floats"),
        (lambda: accept_walk_reference(*[torch.zeros(1, 2, dtype=torch.int64)] * 4, 1), r"num_nodes must be int64 \[1\]"),
        (
            lambda: commit_path_reference(
                torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 2, dtype=torch.int64), *[torch.zeros(1, dtype=torch.int32)] * 2
            ),
            "memory must have 1 rows as path has, got 2",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@interpreted
def test_the_ops_tell_torch_compile_what_they_need():
    tree = random_trees(2, 5, 30, torch.Generator().manual_seed(0))
    chosen = torch.zeros(2, 5, dtype=torch.int64)
    torch.library.opcheck(torch.ops.jetflow.accept_walk, (tree.tokens, tree.parents, tree.num_nodes, chosen, 3))
    torch.library.opcheck(torch.ops.jetflow.top_tokens, (torch.randn(2, 50), 4))
    memory = torch.randn(2, 1, 1, 8, 4)
    path, one, two = torch.tensor([[0, 2]]), torch.tensor([3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    torch.library.opcheck(torch.ops.jetflow.commit_path, (memory, path, one, two, None))


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_block_is_a_special_tree_behind_its_context(monkeypatch, causal):
    """The head's attention by the tree kernel, for rows of different context lengths, one of them empty."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "block_size": 6, "mask_token_id": 60, "taps": (0, 1, 3), "causal": causal}
    head = BlockDraftHead(DraftHeadConfig.for_target(make_model("qwen3").config, **sizes)).eval()
    features, blocks, visible = torch.randn(3, 9, 96), torch.randn(3, 6, 32), torch.ones(6, 6, dtype=torch.bool)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr("jetflow.kernels.dispatch.runs_kernels", lambda tensor, on=kernels: on)
        cache = head.new_cache(3)
        head.extend_context(cache, features, [9, 0, 4])
        found.append(head.draft(blocks, cache, visible.tril() if causal else visible))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@interpreted
@torch.no_grad()
def test_the_head_reads_different_trees_behind_their_contexts(monkeypatch):
    """As in a second pass: rows with trees of their own, by the kernel and by the plain path."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "block_size": 6, "mask_token_id": 60, "taps": (0, 1, 3), "refinement": True}
    head = BlockDraftHead(DraftHeadConfig.for_target(make_model("qwen3").config, **sizes)).eval()
    features, nodes, trees = torch.randn(3, 9, 96), torch.randn(3, 7, 32), random_trees(3, 7, 30, torch.Generator())
    found = []
    for kernels in (False, True):
        monkeypatch.setattr("jetflow.kernels.dispatch.runs_kernels", lambda tensor, on=kernels: on)
        cache = head.new_cache(3)
        head.extend_context(cache, features, [9, 0, 4])
        found.append(head.draft(nodes, cache, trees.ancestor_mask(), trees.depths))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@interpreted
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_by_kernels_gives_the_text_of_the_plain_path(monkeypatch, paged):
    """As on a GPU: top tokens, walk and commit by kernels, over contiguous and paged memory."""
    target = Target(make_model("qwen3"))
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "block_size": 6, "mask_token_id": 60, "taps": (0, 1, 3)}
    head = BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes)).eval()
    prompt = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]

    def text():
        pages = target.new_page_pool(20, 4) if paged else None
        decoder = SpeculativeDecoder(target, ParallelDrafter(head, target), budget=7, pages=pages)
        return decoder.generate(prompt, max_new_tokens=12)

    plain = text()
    monkeypatch.setattr("jetflow.kernels.dispatch.runs_kernels", lambda tensor: True)
    fast = text()
    assert fast.token_ids == plain.token_ids
    assert [one.num_kept for one in fast.rounds] == [one.num_kept for one in plain.rounds]


def test_kernels_in_the_interpreter():
    run_in_interpreter(__file__)
