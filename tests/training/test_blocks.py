"""Masked and filled blocks: what each slot holds, sees and predicts, and that decoding sees the same."""

import pytest
import torch
from conftest import make_model

from jetflow import BlockDraftHead, DraftHeadConfig, ParallelDrafter, Target, TokenTree
from jetflow.losses import CrossEntropy, exponential_position_weights
from jetflow.training import Batch, StepSettings, TeacherStates, block_loss, supervised_slots
from jetflow.training.blocks import block_tokens, predicting_slots, previous_embeds, visible_prefixes

BLOCK, LENGTH, MASK = 6, 16, 60
ANCHORS = torch.tensor([[2, 4, 6, 7, 9, 12], [3, 5, 8, 9, 10, 11]])
SETTINGS = StepSettings(CrossEntropy(), decay_rate=3.0, filled_share=0.5, marginal_share=0.5)


@pytest.fixture(scope="module")
def target():
    return Target(make_model("qwen3"))


def make_head(target, correction=None):
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(
        target.config, num_layers=2, block_size=BLOCK, mask_token_id=MASK, taps=(0, 1, 3), correction=correction,
        correction_rank=8, refinement=True,
    )  # fmt: skip
    head = BlockDraftHead(config).eval()
    if correction is not None:
        torch.nn.init.normal_(head.correction.up.weight, std=0.5)
    return head


def make_batch():
    token_ids = torch.randint(1, MASK, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return Batch(token_ids, torch.ones(2, LENGTH, dtype=torch.bool))


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def run(head, target, batch=None, states=None, settings=SETTINGS):
    """Loss, the hidden states of all slots [B, A, T, H] without a correction, and the visible prefixes [A]."""
    seen = []
    hook = head.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    valid = torch.ones_like(ANCHORS, dtype=torch.bool)
    batch = batch or make_batch()
    out = block_loss(
        head, target, batch, anchors=ANCHORS, valid=valid, settings=settings, states=states, generator=drawn()
    )  # fmt: skip
    hook.remove()
    visible = visible_prefixes(ANCHORS.shape[1], BLOCK, settings.filled_share, drawn())
    return out, seen[0].unflatten(1, (-1, BLOCK)), visible


def test_prefixes_have_the_share_and_the_lengths_that_are_asked_for():
    lengths = torch.cat([visible_prefixes(50, BLOCK, 0.3, drawn(seed)) for seed in range(400)])
    filled = lengths[lengths > 0]
    assert len(filled) / len(lengths) == pytest.approx(0.3, abs=0.005)
    counts = torch.bincount(filled, minlength=BLOCK)[1:] / len(filled)
    # Half are filled to the end, and 1 .. T - 1 share the other half alike.
    expected = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6])
    torch.testing.assert_close(counts, expected, atol=0.01, rtol=0)
    assert visible_prefixes(9, BLOCK, 0.0).tolist() == [0] * 9
    assert (visible_prefixes(9, BLOCK, 1.0) > 0).all()
    # The first block is no more often masked than the others, as documents may have one anchor only.
    first = torch.stack([visible_prefixes(1, BLOCK, 0.3, drawn(seed)) for seed in range(1000)])
    assert (first > 0).float().mean().item() == pytest.approx(0.3, abs=0.05)


def test_prefixes_depend_on_the_generator_and_the_place_alone():
    assert torch.equal(visible_prefixes(40, BLOCK, 0.5, drawn())[:7], visible_prefixes(7, BLOCK, 0.5, drawn()))
    assert not torch.equal(visible_prefixes(40, BLOCK, 0.5, drawn()), visible_prefixes(40, BLOCK, 0.5, drawn(1)))


def test_blocks_show_true_tokens_up_to_their_prefix(target):
    config, token_ids = make_head(target).config, make_batch().token_ids
    visible = torch.tensor([0, 1, 3, 5, 0, 2])
    blocks = block_tokens(token_ids, ANCHORS, visible, config)
    for row in range(2):
        for index, anchor in enumerate(ANCHORS[row].tolist()):
            for slot in range(BLOCK):
                shown = slot <= int(visible[index])
                expected = int(token_ids[row, min(anchor + slot, LENGTH - 1)]) if shown else MASK
                assert int(blocks[row, index, slot]) == expected


def test_slots_that_hold_a_token_predict_the_next_one():
    visible = torch.tensor([0, 2, 5])
    found = [predicting_slots(torch.full((5,), block), torch.arange(5), visible).tolist() for block in range(3)]
    # Depth 3 of the second block follows its last filled slot; depths 4 and 5 have masks of their own.
    assert found == [[1, 2, 3, 4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("filled", [False, True], ids=["plain", "corrected"])
def test_which_slots_are_corrected_and_by_what(target, filled):
    token_ids, visible = make_batch().token_ids, torch.tensor([0, 2, 0, 5, 0, 0])
    given = {"block_size": BLOCK, "marginal_share": 0.5, "correct_filled": filled}
    embeds = previous_embeds(target, token_ids, ANCHORS, visible, **given).unflatten(1, (6, BLOCK))
    corrected = [(embeds[0, block] != 0).any(-1).long().tolist() for block in range(6)]
    everywhere = [0, 1, 1, 1, 1, 1]
    # Of the masked blocks, every second goes without.
    by_prefix = ([1] * 6, [1] * 6) if filled else ([0, 0, 0, 1, 1, 1], [0] * 6)
    assert corrected == [everywhere, by_prefix[0], [0] * 6, by_prefix[1], everywhere, [0] * 6]
    # A masked slot by the token before its own, a filled one by its own.
    torch.testing.assert_close(embeds[1, 1, 3], target.embed(token_ids[1, 5 + 2]))
    if filled:
        torch.testing.assert_close(embeds[1, 1, 2], target.embed(token_ids[1, 5 + 2]))


@pytest.mark.parametrize("correction", [None, "gated", "recurrent"])
@torch.no_grad()
def test_loss_is_that_of_the_predicting_slots(target, correction):
    head, batch = make_head(target, correction), make_batch()
    out, hidden, visible = run(head, target, batch)
    assert (visible > 0).any()
    assert (visible[visible > 0] < BLOCK - 1).any()
    if correction is not None:
        given = {"block_size": BLOCK, "marginal_share": 0.5, "correct_filled": correction == "gated"}
        embeds = previous_embeds(target, batch.token_ids, ANCHORS, visible, **given)
        hidden = head.correction(hidden, embeds.unflatten(1, (-1, BLOCK)))
    weights = exponential_position_weights(BLOCK, 3.0).tolist()
    total = weight_sum = 0.0
    for row in range(2):
        for index, anchor in enumerate(ANCHORS[row].tolist()):
            for depth in range(1, min(BLOCK, LENGTH - anchor)):
                prefix = int(visible[index])
                slot = depth - 1 if prefix > 0 and depth <= prefix + 1 else depth
                log_probs = target.lm_head(hidden[row, index, slot]).log_softmax(-1)
                total -= weights[depth - 1] * float(log_probs[batch.token_ids[row, anchor + depth]])
                weight_sum += weights[depth - 1]
    assert out.loss.item() == pytest.approx(total / weight_sum, rel=1e-5)


@torch.no_grad()
def test_the_second_pass_sees_what_filled_slots_see(target):
    head, batch = make_head(target), make_batch()
    _, hidden, visible = run(head, target, batch)
    features, _ = target.features(batch.token_ids, head.config.taps)
    for row in range(2):
        for index, anchor in enumerate(ANCHORS[row].tolist()):
            count = min(int(visible[index]), LENGTH - 1 - anchor) + 1
            path = batch.token_ids[row, anchor : anchor + count].tolist()
            # The true path in a tree, beside a branch of other tokens.
            tokens, parents = [*path, 7, 8], [*range(-1, count - 1), 0, count]
            drafter = ParallelDrafter(head, target, passes=2)
            drafter.reset(1)
            drafter.observe(batch.token_ids[row : row + 1, :anchor], features[row : row + 1, :anchor], torch.tensor([anchor]))
            states = drafter._read(TokenTree.from_parents([tokens], [parents]))
            torch.testing.assert_close(states[0, :count], hidden[row, index, :count], atol=1e-5, rtol=0)


@torch.no_grad()
def test_no_slot_sees_the_token_that_it_predicts(target):
    head, batch = make_head(target), make_batch()
    states = TeacherStates(*target.features(batch.token_ids, head.config.taps))
    _, hidden, visible = run(head, target, batch, states)
    slots = supervised_slots(batch.loss_mask, ANCHORS, valid=torch.ones_like(ANCHORS, dtype=torch.bool), block_size=BLOCK)
    rows, blocks, depths = slots.nonzero(as_tuple=True)
    predicting = predicting_slots(blocks, depths, visible)
    for place in range(3, LENGTH):
        changed = batch.token_ids.clone()
        changed[:, place] = changed[:, place] % (MASK - 1) + 1
        _, moved, _ = run(head, target, Batch(changed, batch.loss_mask), states)
        labels = ANCHORS[rows, blocks] + depths + 1 == place
        chosen = (rows[labels], blocks[labels], predicting[labels])
        assert torch.equal(moved[chosen], hidden[chosen])
        # The next slots of filled blocks do see it.
        if place == 7:
            assert not torch.equal(moved, hidden)


def test_metrics_are_about_masked_blocks(target):
    head, batch = make_head(target), make_batch()
    out, _, visible = run(head, target, batch)
    masked = (visible == 0).expand_as(ANCHORS)
    alone = block_loss(
        head, target, batch, anchors=ANCHORS, valid=masked, settings=SETTINGS._replace(filled_share=0.0), generator=drawn()
    )  # fmt: skip
    for name in ("accuracy_by_depth", "num_slots_by_depth", "expected_acceptance_length", "num_anchors"):
        torch.testing.assert_close(getattr(out, name), getattr(alone, name), atol=1e-6, rtol=1e-5)
    assert out.weight_sum > alone.weight_sum
    assert not torch.isclose(out.loss, alone.loss)


def test_what_cannot_be_is_refused(target):
    with pytest.raises(ValueError, match=r"filled_share must be in \[0, 1\], got 1.5"):
        run(make_head(target), target, settings=SETTINGS._replace(filled_share=1.5))
    with pytest.raises(ValueError, match="refinement=True needs causal=True"):
        DraftHeadConfig.for_target(
            target.config, num_layers=1, block_size=4, mask_token_id=60, taps=(0,), causal=False, refinement=True
        )
