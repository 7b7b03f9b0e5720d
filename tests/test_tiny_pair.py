"""The shipped pair on prompts that its training never saw."""

import json
from pathlib import Path

import pytest

from jetflow.demo import tiny_decoders

MODELS = Path(__file__).parents[1] / "models" / "tiny"
NUM_PROMPTS = 20


@pytest.fixture(scope="module")
def runs():
    target, decoders = tiny_decoders(MODELS, [16, 64])
    lines = (MODELS / "heldout.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in lines]
    return {name: decoder.generate(prompts, max_new_tokens=160) for name, decoder in decoders.items()}


def test_all_methods_write_the_same_text(runs):
    texts = [[result.token_ids for result in results] for results in runs.values()]
    assert all(text == texts[0] for text in texts)
    assert all(result.finish_reason == "stop" for result in runs["autoregressive"])


@pytest.mark.parametrize(("budget", "tau"), [(16, 7.0), (64, 8.0)])
def test_acceptance_length_is_what_the_card_promises(runs, budget, tau):
    rounds = [stats.num_kept for result in runs[f"JetFlow, budget {budget}"] for stats in result.rounds]
    assert sum(rounds) / len(rounds) >= tau


def test_the_pair_is_small():
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < 12e6
