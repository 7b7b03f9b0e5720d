"""Draft layers with a sliding window: what each slot sees, in training and while decoding, and what checkpoints say."""

import dataclasses

import pytest
import torch
from conftest import make_model
from test_block_draft_head import CONFIG, TOLERANCE, decode, in_block, make_head
from test_checkpoint import config

from jetflow import BlockDraftHead, Target, TokenTree, load_head, masks, save_head
from jetflow.heads.checkpoint import read_config
from jetflow.heads.window import WindowedLayers
from jetflow.training.warm_start import warm_start

BLOCK = CONFIG.block_size
# In-block rule of the layers without a window, and the window.
KINDS = {
    "all causal": (True, WindowedLayers(6, (0, 1))),
    "one of two": (True, WindowedLayers(5, (1,))),
    "bidirectional": (False, WindowedLayers(7, (0, 1), causal=False)),
    "causal beside bidirectional": (False, WindowedLayers(6, (0,))),
}
kinds = pytest.mark.parametrize(("causal", "window"), KINDS.values(), ids=KINDS)


def packed(head, blocks, features, anchors):
    """One training pass over blocks [B, A, T, H]."""
    positions = (anchors[:, :, None] + torch.arange(BLOCK)).flatten(1)
    rows, queries, length = len(anchors), anchors.shape[1] * BLOCK, features.shape[1]

    def mask(causal, window):
        rule = masks.anchor_blocks(anchors, BLOCK, length, causal=causal, window=window)
        return masks.dense(rule, rows, 1, queries, length + queries)

    window = head.config.window
    hidden = head(
        blocks.flatten(1, 2), features, positions, mask(head.config.causal, None),
        window_mask=mask(window.causal, window.size),
    )  # fmt: skip
    return hidden.unflatten(1, (-1, BLOCK))


@kinds
@torch.no_grad()
def test_packed_training_pass_equals_decoding_each_block(causal, window):
    head = make_head(causal=causal, window=window)
    features, anchors = torch.randn(2, 21, 64), torch.tensor([[0, 4, 21], [5, 16, 2]])
    blocks = torch.randn(2, 3, BLOCK, 32)
    found = packed(head, blocks, features, anchors)
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            single = decode(head, blocks[row, index][None], features[row : row + 1, :anchor], causal)
            torch.testing.assert_close(found[row, index], single[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [5, 8])
@torch.no_grad()
def test_a_slot_reacts_to_the_positions_of_its_window_alone(causal, size):
    """One layer, so that a slot's output depends on what it sees and on nothing that others see."""
    head = make_head(num_layers=1, causal=causal, window=WindowedLayers(size, (0,), causal))
    features, block, length = torch.randn(1, 12, 64), torch.randn(1, BLOCK, 32), 12
    before = decode(head, block, features, causal)
    for position in range(length):
        changed = features.clone()
        changed[0, position] += 1.0
        after = decode(head, block, changed, causal)
        for slot in range(BLOCK):
            sees = position > length + slot - size
            assert torch.equal(after[:, slot], before[:, slot]) == (not sees), (position, slot)
    for other in range(BLOCK):
        changed = block.clone()
        changed[0, other] += 1.0
        after = decode(head, changed, features, causal)
        for slot in range(BLOCK):
            sees = other <= slot or not causal
            assert torch.equal(after[:, slot], before[:, slot]) == (not sees), (other, slot)


@torch.no_grad()
def test_windowed_layers_are_causal_beside_bidirectional_ones():
    """Only a layer without a window lets a slot see later ones."""
    block, features = torch.randn(1, BLOCK, 32), torch.randn(1, 9, 64)
    changed = block.clone()
    changed[0, -1] += 1.0
    for layers, num_layers, reacts in (((0, 1), 3, True), ((1,), 2, True), ((0,), 2, True)):
        head = make_head(num_layers=num_layers, causal=False, window=WindowedLayers(6, layers))
        before, after = (decode(head, one, features, causal=False) for one in (block, changed))
        assert (not torch.equal(before[:, 0], after[:, 0])) == reacts
    # The last layer has the window: what it adds from later slots is nothing.
    head = make_head(num_layers=2, causal=False, window=WindowedLayers(6, (1,)))
    head.layers[0].self_attn.o_proj.weight.zero_()
    before, after = (decode(head, one, features, causal=False) for one in (block, changed))
    assert torch.equal(before[:, :-1], after[:, :-1])


@kinds
@torch.no_grad()
def test_rows_of_different_context_lengths_equal_single_rows(causal, window):
    head = make_head(causal=causal, window=window)
    lengths = [19, 0, 8]
    features, blocks = torch.randn(3, 19, 64), torch.randn(3, BLOCK, 32)
    cache = head.new_cache(3)
    head.extend_context(cache, features, lengths)
    together = head.draft(blocks, cache, in_block(causal))
    for row, length in enumerate(lengths):
        alone = decode(head, blocks[row : row + 1], features[row : row + 1, :length], causal)
        torch.testing.assert_close(together[row], alone[0], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_nodes_of_a_tree_see_their_windows():
    """As a second pass reads them: each path of a tree gives what it gives alone."""
    head = make_head(window=WindowedLayers(6, (0, 1)), refinement=True)
    tree = TokenTree.from_parents([[9, 1, 2, 3, 4, 5]], [[-1, 0, 0, 1, 2, 3]])
    embeds, features = torch.randn(1, 6, 32), torch.randn(1, 15, 64)
    cache = head.new_cache(1)
    head.extend_context(cache, features, [15])
    found = head.draft(embeds, cache, tree.ancestor_mask(), tree.depths)
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        rule = masks.dense(masks.causal(), 1, 1, len(path), len(path))[0, 0]
        alone = head.draft(embeds[:, path], cache, rule)
        torch.testing.assert_close(found[:, path], alone, atol=TOLERANCE, rtol=0)


def test_a_head_must_get_the_masks_that_it_has_layers_for():
    features, block, positions, mask = (
        torch.zeros(1, 3, 64),
        torch.zeros(1, 5, 32),
        torch.arange(5)[None],
        torch.ones(1, 1, 5, 8),
    )
    with pytest.raises(ValueError, match="window_mask goes with a head that has windowed layers; it is absent"):
        make_head(window=WindowedLayers(6, (0,)))(block, features, positions, mask.bool())
    with pytest.raises(ValueError, match="it is given, the head's window=None"):
        make_head()(block, features, positions, mask.bool(), window_mask=mask.bool())


@kinds
def test_a_checkpoint_keeps_it(tmp_path, causal, window):
    head = make_head(causal=causal, window=window)
    save_head(head, tmp_path)
    assert load_head(tmp_path).config == head.config


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
SPECULATORS = {"speculators_config": {}, "aux_hidden_state_layer_ids": [1, 3]}


@pytest.mark.parametrize(
    ("changes", "causal", "window"),
    [
        # z-lab's DFlash 2, NeMo.
        ({**SLIDING, "is_causal": False}, False, WindowedLayers(6, (0, 1), causal=False)),
        ({**SLIDING, "is_causal": True}, True, WindowedLayers(6, (0, 1))),
        # z-lab's DFlash, SpecForge: no flag, each layer by its type.
        (SLIDING, True, WindowedLayers(6, (0, 1))),
        (MIXED, False, WindowedLayers(6, (0,))),
        ({**MIXED, "nested": {"causal_head": True}}, True, WindowedLayers(6, (0,))),
        ({**MIXED, "nested": {"causal": False}}, False, WindowedLayers(6, (0,), causal=False)),
        ({**MIXED, "drop": ("use_sliding_window",)}, False, WindowedLayers(6, (0,))),
        # speculators.
        ({**MIXED, **SPECULATORS, "drop": ("target_layer_ids",)}, False, WindowedLayers(6, (0,))),
        (
            {**SLIDING, **SPECULATORS, "drop": ("target_layer_ids",), "sliding_window_non_causal": True},
            False,
            WindowedLayers(6, (0, 1), causal=False),
        ),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 6}, False, None),
    ],
)
def test_windows_of_every_dialect(changes, causal, window):
    read = read_config(config(**changes))
    assert (read.causal, read.window) == (causal, window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=true, so it must hold layer_types"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types must be full_attention or sliding_attention, got 'chunked"),
        ({**SLIDING, "layer_types": ["sliding_attention"]}, "layer_types names 1 layers, num_hidden_layers=2"),
        ({**SLIDING, "use_sliding_window": False}, "use_sliding_window=false, layer_types has sliding_attention"),
        ({**SLIDING, "sliding_window": None}, "sliding_window must be above 0, got None"),
        ({**SLIDING, "sliding_window": 4}, "window.size=4 must be at least block_size=5"),
        ({**SLIDING, "is_causal": True, "sliding_window_non_causal": True}, "sliding_window_non_causal=true, and all layers"),
        ({"use_swa": True}, "use_swa=True"),
        ({"nested": {"use_swa": True}}, "use_swa=True"),
    ],
)
def test_what_checkpoints_must_not_say(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(config(**changes))


@pytest.mark.parametrize(
    ("causal", "window", "message"),
    [
        (True, WindowedLayers(4, (0,)), "window.size=4 must be at least block_size=5"),
        (True, WindowedLayers(6, ()), r"window.layers=\(\) must be one or more rising numbers in \[0, 2\)"),
        (True, WindowedLayers(6, (2,)), r"window.layers=\(2,\) must be"),
        (True, WindowedLayers(6, (1, 0)), r"window.layers=\(1, 0\) must be"),
        (True, WindowedLayers(6, (0,), causal=False), "window.causal=False needs causal=False"),
        (False, WindowedLayers(6, (0, 1)), "causal=False contradicts window.causal=True, which all 2 layers have"),
    ],
)
def test_windows_that_do_not_fit_are_refused(causal, window, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, causal=causal, window=window)


def test_warm_starts_keep_windows_as_far_as_there_are_layers():
    target = Target(make_model("qwen3"))
    start = make_head(causal=False, window=WindowedLayers(6, (0, 1), causal=False))
    assert warm_start(start, target).config.window == start.config.window
    assert warm_start(start, target, causal=True).config.window == WindowedLayers(6, (0, 1))
    assert warm_start(start, target, num_layers=1).config.window == WindowedLayers(6, (0,), causal=False)
    second = BlockDraftHead(dataclasses.replace(CONFIG, window=WindowedLayers(6, (1,))))
    assert warm_start(second, target, num_layers=1).config.window is None
    assert warm_start(second, target, window=WindowedLayers(9, (0,))).config.window == WindowedLayers(9, (0,))
