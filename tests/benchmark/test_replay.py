"""Replay gives the rounds of real decodes."""

import json
from pathlib import Path

import pytest
import torch

from jetflow.acceptors import SamplingAcceptor
from jetflow.benchmark.replay import Text, replay
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.heads.checkpoint import load_head
from jetflow.targets import Target
from jetflow.training.answering import answer_prompts

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.fixture(scope="module")
def pair():
    target = Target.from_pretrained(str(TINY / "target"), dtype=torch.float32)
    return target, ParallelDrafter(load_head(str(TINY / "head"), dtype=torch.float32), target)


@pytest.fixture(scope="module")
def prompts(pair):
    lines = (TINY / "heldout.jsonl").read_text().splitlines()[:5]
    return [pair[0].chat_ids(json.loads(line)["prompt"]) for line in lines]


@pytest.mark.parametrize(("budget", "limit"), [(2, 30), (16, 160), (64, 41)])
def test_rounds_are_those_of_a_real_decode(pair, prompts, budget, limit):
    target, drafter = pair
    results = SpeculativeDecoder(target, drafter, budget=budget).generate(prompts, max_new_tokens=limit)
    texts = [Text(ids + one.token_ids, len(ids)) for ids, one in zip(prompts, results, strict=True)]
    # One by one, as trees near a length limit depend on how much is left.
    found = [replay(drafter, target, [text], budget, max_new_tokens=limit)[0] for text in texts]
    assert found == [[stats.num_kept for stats in one.rounds] for one in results]
    if limit == 160:
        assert replay(drafter, target, texts, budget, max_new_tokens=limit) == found


def test_rounds_along_a_sampled_text_are_those_of_the_match_rule(pair, prompts):
    target, drafter = pair
    sampled = answer_prompts(target, prompts[:1] * 40, SamplingAcceptor(1.0), 60, generator=torch.Generator().manual_seed(1))
    texts = [Text(prompts[0] + ids, len(prompts[0])) for ids in sampled]
    replayed = [count for rounds in replay(drafter, target, texts, 16, max_new_tokens=60) for count in rounds]
    decoder = SpeculativeDecoder(target, drafter, SamplingAcceptor(1.0), budget=16)
    decoded = [decoder.generate(prompts[0], max_new_tokens=60, seed=seed).rounds for seed in range(40)]
    decoded = torch.tensor([stats.num_kept for rounds in decoded for stats in rounds]).float()
    spread = (torch.tensor(replayed).float().var() / len(replayed) + decoded.var() / len(decoded)).sqrt()
    assert abs(sum(replayed) / len(replayed) - decoded.mean()) < 4 * spread


def test_bad_input_is_refused(pair):
    target, drafter = pair
    with pytest.raises(ValueError, match="a prompt and an answer"):
        replay(drafter, target, [Text([5, 6], 2)], 16, max_new_tokens=9)
    with pytest.raises(ValueError, match="budget must be at least 2"):
        replay(drafter, target, [Text([5, 6], 1)], 1, max_new_tokens=9)
