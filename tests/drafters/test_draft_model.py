"""A small model as the drafter: the text is the target's, and a model that is the target drafts perfectly."""

import pytest
import torch
from conftest import make_model, plain_greedy
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetflow import (
    Beam,
    BestFirst,
    Chain,
    ChildSampling,
    DraftModelDrafter,
    SamplingAcceptor,
    SpeculativeDecoder,
    Target,
    TraversalVerification,
)

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


@pytest.mark.parametrize(("expander", "tau"), [(Chain(), 5.0), (Beam(2), 5.0), (BestFirst(), None)])
def test_the_target_as_its_own_drafter_is_always_right(expander, tau):
    model = make_model("qwen3")
    target = Target(model)
    drafter = DraftModelDrafter(Target(make_model("qwen3")), target, expander, depth=4)
    result = SpeculativeDecoder(target, drafter, budget=40).generate(PROMPT, max_new_tokens=21)
    assert result.token_ids == plain_greedy(model, PROMPT, 21)
    # Best-first spends its nodes by probability, not along the one greedy path.
    assert result.tau == tau or tau is None


def test_another_model_changes_nothing_but_speed(model):
    target = Target(model)
    drafter = DraftModelDrafter(Target(make_model("llama", seed=5)), target, depth=3)
    for budget in (1, 2, 9):
        result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=20)
        assert result.token_ids == plain_greedy(model, PROMPT, 20)


def test_drawn_chains_are_classic_speculative_sampling():
    target = Target(make_model("qwen3"))
    drafter = DraftModelDrafter(Target(make_model("qwen3")), target, Chain(), depth=3, width=61, sampling=ChildSampling())
    result = SpeculativeDecoder(target, drafter, TraversalVerification(), budget=4).generate(PROMPT, max_new_tokens=13, seed=0)
    # The draft's law is the target's, so nothing is rejected.
    assert result.tau == 4.0


def test_a_model_that_ends_before_the_target_drafts_no_further():
    torch.manual_seed(0)
    short = Qwen3Config(**{**make_model("qwen3").config.to_dict(), "max_position_embeddings": 16})
    model = make_model("qwen3")
    drafter = DraftModelDrafter(Target(Qwen3ForCausalLM(short).eval()), Target(model), depth=3)
    result = SpeculativeDecoder(Target(model), drafter, budget=5).generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    assert result.token_ids == plain_greedy(model, PROMPT, 20)


def test_what_does_not_fit_is_named():
    target = Target(make_model("qwen3"))
    other = Qwen3Config(**{**target.model.config.to_dict(), "vocab_size": 62})
    with pytest.raises(ValueError, match="the model's vocab_size is 62, the target's 61"):
        DraftModelDrafter(Target(Qwen3ForCausalLM(other).eval()), target)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        DraftModelDrafter(target, target, depth=0)


def test_a_draft_by_the_targets_own_law_keeps_what_its_trees_expect():
    target = Target(make_model("qwen3"))
    drafter = DraftModelDrafter(Target(make_model("qwen3")), target, BestFirst(), depth=3)
    decoder, rounds = SpeculativeDecoder(target, drafter, SamplingAcceptor(), budget=6), []
    for seed in range(3):
        # The last round is cut by the length limit, which trees know only as a largest depth.
        decoder.generate(PROMPT, max_new_tokens=120, seed=seed, eos_token_id=[], on_round=rounds.append)
    kept = torch.tensor([float(len(one.kept)) for one in rounds])
    expected = torch.tensor([one.expected_kept for one in rounds])
    error = (kept - expected).std() / len(rounds) ** 0.5
    assert expected.std() > 0.1
    assert abs(float((kept - expected).mean())) < 3 * error
    # The mean over rounds tells trees of another size apart.
    assert error < 0.1
