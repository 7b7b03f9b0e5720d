"""Masks against the rules written as plain loops."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from jetflow import TokenTree, masks

S, BLOCK = 13, 4
ANCHORS = torch.tensor([[0, 5, 12], [3, 3, 9]])


def loops(rule, batch, q_len, kv_len):
    return torch.tensor([[[bool(rule(b, q, k)) for k in range(kv_len)] for q in range(q_len)] for b in range(batch)])[:, None]


@pytest.mark.parametrize("window", [None, 4, 6, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_anchor_blocks_follow_their_rules(causal, window):
    q_len = ANCHORS.shape[1] * BLOCK

    def rule(b, q, k):
        block, offset = divmod(q, BLOCK)
        if k < S:
            return k < ANCHORS[b, block] and (window is None or k > ANCHORS[b, block] + offset - window)
        key_block, key_offset = divmod(k - S, BLOCK)
        return key_block == block and (key_offset <= offset or not causal)

    built = masks.dense(masks.anchor_blocks(ANCHORS, BLOCK, S, causal=causal, window=window), 2, 1, q_len, S + q_len)
    assert torch.equal(built, loops(rule, 2, q_len, S + q_len))
    assert built.any(-1).all()


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_tree_causal_sees_prefix_ancestors_and_itself(window):
    parents = [[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, -1, -1]]
    tree = TokenTree.from_parents([[3, 4, 5, 6, 7, 8]] * 2, parents, num_nodes=[6, 4])
    prefix = [4, 2]

    def ancestors(b, node):
        seen = {node}
        while parents[b][node] >= 0:
            node = parents[b][node]
            seen.add(node)
        return seen

    def rule(b, q, k):
        position = prefix[b] + int(tree.depths[b, q])
        if k < prefix[b]:
            return window is None or k > position - window
        node = k - prefix[b]
        if node >= 6 or node not in ancestors(b, q):
            return False
        return window is None or prefix[b] + int(tree.depths[b, node]) > position - window

    built = masks.dense(masks.tree_causal(tree, torch.tensor(prefix), window=window), 2, 1, 6, 10)
    assert torch.equal(built, loops(rule, 2, 6, 10))
    assert built.any(-1).all()


def test_simple_rules_and_their_combinations():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]])
    cases = {
        masks.causal(): lambda b, q, k: k <= q,
        masks.sliding_window(2): lambda b, q, k: q - 2 < k <= q,
        masks.same_document(documents): lambda b, q, k: documents[b, q] == documents[b, k],
        masks.and_masks(masks.causal(), masks.same_document(documents)): (
            lambda b, q, k: k <= q and documents[b, q] == documents[b, k]
        ),
        masks.or_masks(masks.sliding_window(1), masks.same_document(documents)): (
            lambda b, q, k: k == q or documents[b, q] == documents[b, k]
        ),
    }
    for rule, loop in cases.items():
        assert torch.equal(masks.dense(rule, 1, 1, 6, 6), loops(loop, 1, 6, 6))


def test_window_of_four_sees_four_keys():
    built = masks.dense(masks.sliding_window(4), 1, 1, 12, 12)
    assert built[0, 0, 10].nonzero().flatten().tolist() == [7, 8, 9, 10]


def test_additive_is_zero_or_minus_infinity_and_refuses_empty_rows():
    built = masks.dense(masks.causal(), 1, 1, 5, 5)
    added = masks.additive(built, torch.float32)
    assert torch.equal(added == 0, built)
    assert (added[~built] == float("-inf")).all()
    empty = built.clone()
    empty[0, 0, 2] = False
    with pytest.raises(ValueError, match="attend to nothing"):
        masks.additive(empty, torch.float32)
    with pytest.raises(ValueError, match="must be bool"):
        masks.additive(built.float(), torch.float32)


@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_with_the_block_mask_equals_the_dense_mask(window):
    from torch.nn.attention.flex_attention import flex_attention

    anchors = torch.tensor([[3, 70, 100], [50, 51, 130]])
    context, q_len = 130, 3 * 6
    rule = masks.anchor_blocks(anchors, 6, context, causal=True, window=window)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, q_len, 16, generator=generator)
    k, v = (torch.randn(2, 2, context + q_len, 16, generator=generator) for _ in range(2))
    dense = scaled_dot_product_attention(q, k, v, attn_mask=masks.dense(rule, 2, 1, q_len, context + q_len))
    sparse = flex_attention(q, k, v, block_mask=masks.block_mask(rule, 2, 1, q_len, context + q_len))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "make", [lambda: masks.sliding_window(0), lambda: masks.in_block(causal=True, block_size=0, context_len=3)]
)
def test_sizes_below_one_are_refused(make):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        make()


def test_windows_that_cut_a_block_are_refused():
    with pytest.raises(ValueError, match="window=3 must be at least block_size=4"):
        masks.anchor_blocks(ANCHORS, BLOCK, S, causal=True, window=3)
