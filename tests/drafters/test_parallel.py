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


@torch.no_grad()
def test_states_of_a_batch_lie_next_to_each_other():
    """A product with rows that do not is taken row by row, which is much slower."""
    target = Target(make_model("qwen3"))
    drafter = ParallelDrafter(make_head(target), target)
    features, _ = target.features(torch.tensor([PROMPT, PROMPT]), drafter.taps)
    drafter.reset(2)
    drafter.observe(torch.tensor([PROMPT, PROMPT]), features, torch.tensor([len(PROMPT)] * 2))
    assert drafter._draft(torch.tensor([7, 8]), 4).is_contiguous()


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


def test_parts_that_have_decoded_go_on_outside_a_decode():
    """Their memory is that of ordinary tensors, though decoding runs under inference mode."""
    target = Target(make_model("qwen3"))
    drafter = ParallelDrafter(make_head(target), target)
    decoder = SpeculativeDecoder(target, drafter, budget=4)
    decoder.generate(PROMPT, max_new_tokens=8)
    features, _ = target.features(torch.tensor([PROMPT]), drafter.taps)
    drafter.observe(torch.tensor([PROMPT]), features, torch.tensor([len(PROMPT)]))
    decoder._verifier.prefill(torch.tensor([PROMPT]), torch.tensor([len(PROMPT)]))
    # A head that learns between two decodes has its gradients.
    drafter._head.fc(features).sum().backward()
    assert drafter._head.fc.weight.grad is not None


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


def test_a_part_of_the_vocabulary_is_all_that_is_drafted_and_the_text_stays(model):
    target = Target(model)
    head, vocabulary = make_head(target), torch.tensor([40, 3, 17, 9, 22, 30])
    drafter = ParallelDrafter(head, target, vocabulary=vocabulary)
    drafted = []
    result = SpeculativeDecoder(target, drafter, budget=9).generate(
        PROMPT, max_new_tokens=20, on_round=lambda event: drafted.extend(event.tree.tokens[0, 1:].tolist())
    )
    assert result.token_ids == plain_greedy(model, PROMPT, 20)
    assert drafted
    assert set(drafted) <= set(vocabulary.tolist())
    everything = ParallelDrafter(head, target, vocabulary=torch.arange(target.vocab_size))
    whole = ParallelDrafter(head, target)
    for one in (everything, whole):
        one.reset(1)
    roots = torch.tensor([5])
    torch.testing.assert_close(everything.draft_logits(roots, 3), whole.draft_logits(roots, 3))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (torch.tensor([1, 1]), "each token once"),
        (torch.tensor([1.0]), "must be int64"),
        (torch.tensor([], dtype=torch.int64), "must be int64"),
        (torch.tensor([0, 4000]), r"must be in \[0, \d+\), got 0 to 4000"),
    ],
)
def test_vocabularies_that_make_no_sense_are_refused(vocabulary, message):
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match=message):
        ParallelDrafter(make_head(target), target, vocabulary=vocabulary)


def test_shape_deeper_than_the_head_drafts_is_refused():
    target = Target(make_model("qwen3"))
    chain = FixedShape(list(range(-1, 6)), [0] * 7)
    with pytest.raises(ValueError, match="asks for 6 levels, but a head of block_size=6 drafts 5"):
        ParallelDrafter(make_head(target), target, chain)
