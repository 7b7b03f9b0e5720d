import dataclasses

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import (
    Beam,
    BestFirst,
    BlockDraftHead,
    Chain,
    DraftHeadConfig,
    FanoutBestFirst,
    FixedShape,
    ParallelDrafter,
    SpeculativeDecoder,
    Target,
)

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


def make_head(target: Target, *, causal: bool = True, **changes) -> BlockDraftHead:
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(
        target.config, num_layers=2, block_size=6, mask_token_id=60, taps=(0, 1, 3), causal=causal
    )
    return BlockDraftHead(dataclasses.replace(config, **changes)).eval()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "expander", [BestFirst(), FanoutBestFirst(3), Beam(2), Chain(), FixedShape([-1, 0, 0, 1], [0, 0, 1, 0])]
)
def test_an_untrained_head_changes_nothing_but_speed(causal, expander):
    model = make_model("qwen3")
    target = Target(model)
    drafter = ParallelDrafter(make_head(target, causal=causal), target, expander)
    for budget in (1, 2, 9):
        result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=25)
        assert result.token_ids == plain_greedy(model, PROMPT, 25)


def test_every_architecture_takes_a_head(model):
    target = Target(model)
    drafter = ParallelDrafter(make_head(target), target)
    result = SpeculativeDecoder(target, drafter, budget=9).generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain_greedy(model, PROMPT, 20)


def test_short_causal_blocks_give_the_logits_of_the_full_block():
    target = Target(make_model("qwen3"))
    drafter = ParallelDrafter(make_head(target), target)
    features, _ = target.features(torch.tensor([PROMPT]), drafter.taps)
    drafter.reset(1)
    drafter.observe(torch.tensor([PROMPT]), features, torch.tensor([len(PROMPT)]))
    root = torch.tensor([7])
    full = drafter.draft_logits(root, 5)
    for depth in range(1, 5):
        torch.testing.assert_close(drafter.draft_logits(root, depth), full[:, :depth], atol=1e-5, rtol=0)


def test_context_cached_round_by_round_equals_one_pass():
    """The cache of a decode holds what a fresh one holds, so rejected nodes leave nothing behind."""
    model = make_model("qwen3")
    target = Target(model)
    drafter = ParallelDrafter(make_head(target), target)
    result = SpeculativeDecoder(target, drafter, budget=9).generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    committed = PROMPT + result.token_ids
    length = drafter._cache.lengths[0]
    root = torch.tensor([committed[length]])
    after = drafter.draft_logits(root, 5)
    features, _ = target.features(torch.tensor([committed[:length]]), drafter.taps)
    drafter.reset(1)
    drafter.observe(torch.tensor([committed[:length]]), features, torch.tensor([length]))
    torch.testing.assert_close(after, drafter.draft_logits(root, 5), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 99}, "vocab_size is 99"),
        ({"target_hidden_size": 16}, "target_hidden_size is 16"),
        ({"num_target_layers": 9}, "num_target_layers is 9"),
    ],
)
def test_heads_of_other_targets_are_refused(changes, message):
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match=message):
        ParallelDrafter(make_head(target, **changes), target)


def test_other_dtype_and_bad_width_are_refused():
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match="dtype"):
        ParallelDrafter(make_head(target).to(torch.bfloat16), target)
    with pytest.raises(ValueError, match="width"):
        ParallelDrafter(make_head(target), target, width=0)
