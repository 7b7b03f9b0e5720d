"""Simulated acceptance: the rate that was asked for, the target's own text, and the same rounds for the same seed."""

import math

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import DraftHeadConfig, SpeculativeDecoder, Target
from jetflow.benchmark.simulated import SimulatedDrafter, SimulatedMethod, TrueText, simulated_config

PROMPTS = [[5, 9, 13, 21, 9, 13, 30, 44, 5, 9], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [31, 41, 59]]


@pytest.fixture(scope="module")
def target():
    return Target(make_model("qwen3"))


def config_for(target):
    return DraftHeadConfig.for_target(target.config, num_layers=2, block_size=6, mask_token_id=60, taps=(0, 2))


def rounds_of(target, drafter, budget, prompt, count):
    rounds = []
    decoder = SpeculativeDecoder(target, drafter, budget=budget)
    result = decoder.generate(prompt, max_new_tokens=count, on_round=rounds.append)
    assert result.token_ids == plain_greedy(target.model, prompt, count)
    return rounds


def offered(tree):
    """How deep the path of first candidates goes."""
    node, depth, parents = 0, 0, tree.parents[0].tolist()
    while node in parents:
        node, depth = parents.index(node), depth + 1
    return depth


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_the_rate_is_the_one_asked_for(target, rate):
    drafter = SimulatedDrafter(target, config_for(target), TrueText(target), rate, seed=3)
    trials = hits = 0
    for prompt in PROMPTS:
        for one in rounds_of(target, drafter, 12, prompt, 100):
            trials += min(one.num_accepted + 1, offered(one.tree))
            hits += one.num_accepted
    assert trials > 200
    # Four standard deviations of the share.
    assert abs(hits / trials - rate) < 4 * math.sqrt(rate * (1 - rate) / trials)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_extreme_rates_are_exact_and_trees_stay_full(target, rate):
    drafter = SimulatedDrafter(target, config_for(target), TrueText(target), rate)
    for budget in (1, 2, 9):
        for one in rounds_of(target, drafter, budget, PROMPTS[0], 30)[:-1]:
            assert one.num_accepted == (offered(one.tree) if rate else 0)
            assert one.tree.max_nodes == budget


def test_the_seed_decides_the_rounds(target):
    def kept(seed):
        drafter = SimulatedDrafter(target, config_for(target), TrueText(target), 0.6, seed)
        return [one.num_accepted for one in rounds_of(target, drafter, 8, PROMPTS[0], 60)]

    assert kept(1) == kept(1) != kept(2)


def test_look_ups_take_no_time(target, monkeypatch):
    truth = TrueText(target)
    decoder = SpeculativeDecoder(target, SimulatedDrafter(target, config_for(target), truth, 0.5), budget=8)
    real = truth._decoder.generate

    def slow(*args, **options):
        truth.seconds += 100
        return real(*args, **options)

    monkeypatch.setattr(truth._decoder, "generate", slow)
    (written,) = SimulatedMethod(decoder, truth)([PROMPTS[0]], 20, 0)
    assert written.seconds < -50
    assert written.phases["build"] < -50


def test_the_text_is_looked_up_once_and_again_where_it_went_another_way(target, monkeypatch):
    truth, calls = TrueText(target), []
    real = truth._decoder.generate
    monkeypatch.setattr(truth._decoder, "generate", lambda ids, **options: calls.append(ids) or real(ids, **options))
    whole = plain_greedy(target.model, PROMPTS[0], 20)
    assert truth.after(PROMPTS[0], 20) == whole
    assert truth.after([*PROMPTS[0], *whole[:5]], 3) == whole[5:8]
    assert len(calls) == 1
    other = [*PROMPTS[0], (whole[0] + 1) % 60]
    assert truth.after(other, 4) == plain_greedy(target.model, other, 4)
    assert calls[1:] == [other]


def test_wrong_settings_are_named(target):
    with pytest.raises(ValueError, match=r"acceptance must be in \[0, 1\], got 1.5"):
        SimulatedDrafter(target, config_for(target), TrueText(target), 1.5)
    assert simulated_config(target).num_layers == 1
    assert simulated_config(target).block_size == 16
    state = torch.random.get_rng_state()
    SimulatedDrafter(target, config_for(target), TrueText(target), 0.5)
    assert torch.equal(torch.random.get_rng_state(), state)
