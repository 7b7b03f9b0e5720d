"""Whole generations with `attention="triton"`, under the interpreter in a process of its own."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_model, plain_greedy
from interpreter import interpreted, run_in_interpreter
from test_decoding import ScriptedDrafter
from test_reference_runs import make_drafter

from jetflow import ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.drafters.prompt_lookup import PromptLookupDrafter

PAIR = Path(__file__).parents[1] / "models" / "tiny"
PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


@interpreted
@pytest.mark.parametrize("page_size", [None, 4])
def test_text_is_that_of_plain_decoding(model, page_size):
    target = Target(model, attention="triton")
    pool = None if page_size is None else target.new_page_pool(20, page_size)
    result = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, pages=pool).generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == plain_greedy(model, PROMPT, 12)
    assert pool is None or pool.num_free == 20


@interpreted
@pytest.mark.parametrize("kind", ["perfect", "random", "second_child"])
def test_scripted_drafts_change_no_text(kind):
    model = make_model("qwen3")
    expected = plain_greedy(model, PROMPT, 12)
    drafter = ScriptedDrafter(kind, expected, len(PROMPT))
    result = SpeculativeDecoder(Target(model, attention="triton"), drafter, budget=7).generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == expected


def repeat_runs(folder, name, page_size, choose, count):
    """Decodes the chosen reference runs of one target again; `count` cuts them."""
    runs = json.loads((folder / "decode_runs.json").read_text())
    target = Target.from_pretrained(str(folder / f"target_{name}"), dtype=torch.float32, attention="triton")
    heads = {kind: load_head(str(folder / f"head_{name}_{kind}"), dtype=torch.float32) for kind in ("causal", "bidirectional")}
    chosen = choose([run for run in runs if run["target"] == name])
    assert chosen
    for run in chosen:
        drafter = make_drafter(run, heads[run["head"]], target)
        pool = None if page_size is None else target.new_page_pool(64, page_size)
        decoder = SpeculativeDecoder(target, drafter, budget=run["budget"], pages=pool)
        result = decoder.generate(run["prompt"], max_new_tokens=min(count, run["max_new_tokens"]))
        assert result.token_ids == run["token_ids"][:count], run
        assert pool is None or pool.num_free == 64


@interpreted
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_the_smallest_reference_generations(shared_fixtures, name, page_size):
    # The interpreter takes most of a second for each round.
    repeat_runs(shared_fixtures, name, page_size, lambda runs: [min(runs, key=lambda run: run["budget"])], 12)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_all_reference_generations(shared_fixtures, name, page_size):
    """Many minutes: TRITON_INTERPRET=1 python -m pytest tests/test_triton_attention.py -m slow."""
    repeat_runs(shared_fixtures, name, page_size, lambda runs: runs, 40)


@interpreted
def test_two_decoders_in_one_process_do_not_disturb_each_other():
    model = make_model("qwen3")
    decoders = [
        SpeculativeDecoder(Target(model, attention=kind), PromptLookupDrafter(), budget=7) for kind in ("triton", "sdpa")
    ]
    expected = plain_greedy(model, PROMPT, 8)
    for decoder in (*decoders, *decoders):
        assert decoder.generate(PROMPT, max_new_tokens=8).token_ids == expected


@interpreted
def test_trained_pair_writes_the_same_text():
    prompt = json.loads((PAIR / "heldout.jsonl").read_text().split("\n")[0])["prompt"]
    results = []
    for kind in ("triton", "sdpa"):
        target = Target.from_pretrained(str(PAIR / "target"), dtype=torch.float32, attention=kind)
        drafter = ParallelDrafter(load_head(PAIR / "head", dtype=torch.float32), target)
        results.append(SpeculativeDecoder(target, drafter, budget=16).generate(target.chat_ids(prompt), max_new_tokens=24))
    assert results[0].token_ids == results[1].token_ids
    assert [one.num_accepted for one in results[0].rounds] == [one.num_accepted for one in results[1].rounds]


def test_generations_under_the_interpreter():
    found = run_in_interpreter(__file__, "-k", "not under_the_interpreter", "-m", "not slow")
    assert " passed" in found or found.strip().startswith(".")


def test_missing_triton_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("jetflow.targets.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"attention='triton' needs the triton package: pip install 'jetflow\[triton\]'"):
        Target(make_model("qwen3"), attention="triton")
