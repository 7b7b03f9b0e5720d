"""Corrections: they start at nothing, decode as they were trained, give honest laws, and never change the text."""

import json

import pytest
import torch
from conftest import make_model, plain_greedy
from safetensors.torch import load_file

from jetflow import (
    BestFirst,
    BlockDraftHead,
    DraftHeadConfig,
    ParallelDrafter,
    SpeculativeDecoder,
    Target,
    load_head,
    save_head,
)
from jetflow.losses import CrossEntropy
from jetflow.protocols import DraftContext, Frontier
from jetflow.training import Batch, StepSettings, block_loss

KINDS = ["pairwise", "gated", "recurrent"]
PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
DEPTH = 4


@pytest.fixture(scope="module")
def target():
    return Target(make_model("qwen3"))


def make_head(target, kind, *, trained=True):
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(
        target.config, num_layers=2, block_size=DEPTH + 1, mask_token_id=60, taps=(0, 1, 3), correction=kind, correction_rank=8
    )
    head = BlockDraftHead(config).eval()
    if kind is not None and trained:
        for weight in head.correction.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return head


def drafter_behind_prompt(head, target, **options):
    drafter = ParallelDrafter(head, target, **options)
    features, _ = target.features(torch.tensor([PROMPT, PROMPT[::-1]]), drafter.taps)
    drafter.reset(2)
    drafter.observe(torch.tensor([PROMPT, PROMPT[::-1]]), features, torch.tensor([len(PROMPT)] * 2))
    return drafter


def source_of(drafter, roots, width):
    return drafter._laws.source(*drafter._laws.logits(drafter._draft(roots, DEPTH), roots[:, None]), width)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_correction_changes_nothing(target, kind):
    correction = make_head(target, kind, trained=False).correction
    states, embeds = torch.randn(2, 3, DEPTH, 32), torch.randn(2, 3, DEPTH, 32)
    assert torch.equal(correction(states, embeds), states)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_zero_embeddings_leave_their_slots_alone(target, kind):
    correction = make_head(target, kind).correction
    states, embeds = torch.randn(2, DEPTH, 32), torch.randn(2, DEPTH, 32)
    embeds[:, 0] = 0
    corrected = correction(states, embeds)
    assert torch.equal(corrected[:, 0], states[:, 0])
    assert not torch.isclose(corrected[:, 1:], states[:, 1:]).all()
    # The path begins behind them.
    torch.testing.assert_close(corrected[:, 1:], correction(states[:, 1:], embeds[:, 1:]))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_decoding_gives_the_laws_that_training_taught(target, kind):
    """With the whole vocabulary as candidates the laws of every path are those of the corrected states, exactly."""
    head = make_head(target, kind)
    drafter = drafter_behind_prompt(head, target)
    roots = torch.tensor([7, 11])
    source = source_of(drafter, roots, target.vocab_size)
    plain = drafter._draft(roots, DEPTH)
    frontier = Frontier(roots[:, None], torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))
    path = [roots]
    for level in range(1, DEPTH + 1):
        tokens, log_probs = source(level, frontier)
        embeds = torch.stack([target.embed(token) for token in path], dim=1)
        expected = target.lm_head(head.correction(plain[:, :level], embeds)[:, -1]).log_softmax(-1)
        torch.testing.assert_close(log_probs[:, 0], expected.gather(1, tokens[:, 0]), atol=2e-5, rtol=0)
        # Go on behind the third best child of the first slot, with another parent beside it.
        chosen = tokens[:, 0, [2, 5]]
        path.append(chosen[:, 0])
        frontier = Frontier(chosen, torch.zeros(2, 2, dtype=torch.int64), log_probs[:, 0, [2, 5]])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_children_never_sum_to_more_than_one(target, kind):
    drafter = drafter_behind_prompt(make_head(target, kind), target)
    roots = torch.tensor([7, 11])
    source = source_of(drafter, roots, 6)
    frontier = Frontier(roots[:, None], torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))
    for level in range(1, DEPTH + 1):
        tokens, log_probs = source(level, frontier)
        assert (log_probs.exp().sum(-1) <= 1 + 1e-5).all()
        assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()
        slots = torch.zeros(2, tokens.shape[2], dtype=torch.int64)
        frontier = Frontier(tokens[:, 0], slots, log_probs[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_tree_is_the_beginning_of_a_large_one(target, kind):
    """A node's law is the same at every budget, so the best nodes are the same, too."""
    drafter = drafter_behind_prompt(make_head(target, kind), target)
    texts = [[*PROMPT, 7], [*PROMPT[::-1], 11]]
    context = DraftContext(torch.tensor([7, 11]), torch.tensor([10, 10]), texts, max_depth=DEPTH)
    large = drafter.propose(context, 40)
    for budget in (2, 3, 5, 8, 20):
        small, expected = drafter.propose(context, budget), large.first(budget)
        assert torch.equal(small.tokens, expected.tokens)
        assert torch.equal(small.parents, expected.parents)
        torch.testing.assert_close(small.scores, expected.scores)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_stays_the_targets(target, kind):
    for options in ({}, {"width": 3}, {"vocabulary": torch.arange(1, 40)}):
        drafter = ParallelDrafter(make_head(target, kind), target, BestFirst(), **options)
        for budget in (1, 2, 9):
            result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=20)
            assert result.token_ids == plain_greedy(target.model, PROMPT, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_keep_the_correction_beside_the_plain_head(target, kind, tmp_path):
    head = make_head(target, kind)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert loaded.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    # Another loader reads a plain head.
    assert not any("correction" in name for name in load_file(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("jetflow_correction") == {"correction": kind, "correction_rank": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = load_head(tmp_path)
    assert plain.correction is None
    assert torch.equal(plain.fc.weight, head.fc.weight)


def batch_and_anchors():
    token_ids = torch.randint(60, (2, 14), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[2, 4, 6, 7], [3, 5, 8, 9]])
    return Batch(token_ids, torch.ones(2, 14, dtype=torch.bool)), anchors


def loss_of(head, target, share):
    batch, anchors = batch_and_anchors()
    settings = StepSettings(CrossEntropy(), marginal_share=share)
    return block_loss(head, target, batch, anchors=anchors, valid=torch.ones_like(anchors, dtype=torch.bool), settings=settings)


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches_each_slot_behind_the_true_token_before_it(target, kind):
    head = make_head(target, kind)
    batch, anchors = batch_and_anchors()
    drafted, correct = [], head.correction
    with torch.no_grad():
        for row, anchor in [(i, int(anchor)) for i in range(2) for anchor in anchors[i]]:
            drafter = ParallelDrafter(head, target)
            ids = batch.token_ids[row : row + 1]
            features, _ = target.features(ids, drafter.taps)
            drafter.reset(1)
            drafter.observe(ids[:, :anchor], features[:, :anchor], torch.tensor([anchor]))
            depth = min(DEPTH, 13 - anchor)
            states = drafter._draft(ids[:, anchor], depth)
            states = correct(states, target.embed(ids[:, anchor : anchor + depth]))
            labels = ids[0, anchor + 1 : anchor + 1 + depth]
            drafted.append(torch.nn.functional.cross_entropy(target.lm_head(states)[0], labels, reduction="none"))
        expected = torch.cat(drafted).mean()
    torch.testing.assert_close(loss_of(head, target, 0.0).loss, expected, atol=1e-5, rtol=0)


def test_marginal_blocks_do_without_the_correction(target):
    head, plain = make_head(target, "gated"), make_head(target, None)
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if not name.startswith("correction.")})
    loss = loss_of(head, target, 1.0).loss
    torch.testing.assert_close(loss, loss_of(plain, target, 0.25).loss)
    between = loss_of(head, target, 0.5).loss
    assert not torch.isclose(between, loss)
    assert not torch.isclose(between, loss_of(head, target, 0.0).loss)
    with pytest.raises(ValueError, match=r"marginal_share must be in \[0, 1\], got 1.5"):
        loss_of(head, target, 1.5)


def test_every_weight_of_a_correction_learns(target):
    for kind in KINDS:
        head = make_head(target, kind)
        loss_of(head, target, 0.25).loss.backward()
        for name, weight in head.correction.named_parameters():
            assert weight.grad.abs().sum() > 0, (kind, name)


def test_wrong_settings_are_named(target):
    with pytest.raises(ValueError, match=r"correction must be one of pairwise, gated, recurrent, markov, .*, got 'domino'"):
        make_head(target, "domino", trained=False)
    with pytest.raises(ValueError, match="selector_candidates=None belongs to correction='selector', got 'selector'"):
        make_head(target, "selector", trained=False)
    with pytest.raises(ValueError, match="correction_rank must be at least 1, got 0"):
        DraftHeadConfig.for_target(
            target.config, num_layers=1, block_size=4, mask_token_id=60, taps=(0,), correction="gated", correction_rank=0
        )
