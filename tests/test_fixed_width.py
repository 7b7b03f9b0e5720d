"""Fixed-width mode: what a node gets depends on its own text alone, to the last bit, in bfloat16 too."""

import pytest
import torch
from conftest import make_model
from test_generation import PROMPT, TreeDrafter

from jetflow import SpeculativeDecoder, Target, TokenTree, TreeVerifier
from jetflow.kernels.masked_attention import masked_attention
from jetflow.kernels.path_attention import path_attention, text_slots
from jetflow.masks import dense, tree_causal

WIDTH = 12
TREES = [
    TokenTree.from_parents([[7, 3, 9, 4]], [[-1, 0, 1, 2]]),
    TokenTree.from_parents([[7, 8, 3, 5, 9, 6, 4]], [[-1, 0, 0, 1, 2, 3, 4]]),
    TokenTree.from_parents([[7, 1, 2, 5, 6, 3, 9, 8, 4]], [[-1, 0, 0, 0, 1, 0, 5, 6, 6]]),
]


@pytest.mark.parametrize("window", [None, 3])
def test_equals_attention_under_the_trees_mask(window):
    torch.manual_seed(0)
    for tree in TREES:
        nodes, prefix = tree.max_nodes, 70
        query = torch.randn(1, 4, nodes, 8)
        key, value = torch.randn(2, 1, 2, prefix + nodes, 8)
        lens = torch.tensor([prefix])
        mask = dense(tree_causal(tree, lens, window=window), 1, 1, nodes, prefix + nodes, device="cpu")
        expected = masked_attention(query, key, value, mask)
        got = path_attention(query, key, value, text_slots(tree, prefix), window=window)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral_sliding"])
def test_logits_of_a_path_are_the_same_bits_in_every_tree(architecture, dtype):
    target = Target(make_model(architecture).to(dtype))
    found = []
    for tree in TREES:
        verifier = TreeVerifier(target, fixed_width=WIDTH)
        verifier.prefill(torch.tensor([PROMPT]), torch.tensor([len(PROMPT)]))
        logits = verifier.verify(tree).logits[0]
        assert len(logits) == tree.max_nodes
        # The path 7, 3, 9, 4 lies in all of them.
        node, path = 0, [0]
        for token in (3, 9, 4):
            node = next(i for i in range(tree.max_nodes) if tree.parents[0, i] == node and tree.tokens[0, i] == token)
            path.append(node)
        found.append(logits[path])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_text_does_not_depend_on_trees_and_budgets(seed):
    target = Target(make_model("llama", seed=seed).to(torch.bfloat16))
    texts = set()
    for budget, perfect in ((1, True), (5, True), (WIDTH, False), (7, False)):
        drafter = TreeDrafter([3, 5, 8, 4] * 20, len(PROMPT), perfect=perfect, seed=budget)
        decoder = SpeculativeDecoder(target, drafter, budget=budget, fixed_width=WIDTH)
        texts.add(tuple(decoder.generate(PROMPT, max_new_tokens=40, eos_token_id=[]).token_ids))
    assert len(texts) == 1


def test_what_it_cannot_do_is_refused():
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match="fixed_width=4 must be at least the budget, 5"):
        SpeculativeDecoder(target, TreeDrafter([], 0, perfect=True), budget=5, fixed_width=4)
    with pytest.raises(ValueError, match="fixed_width must be at least 1, got 0"):
        TreeVerifier(target, fixed_width=0)
