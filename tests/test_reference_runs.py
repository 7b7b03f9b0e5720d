"""Whole generations by the public implementations (JetSpec, DDTree, DFlash chain), repeated with our parts.

The numbers come from their code, run on tiny trained models; see the README in the fixture folder.
"""

import json

import pytest
import torch
from conftest import plain_greedy
from test_decoding import ScriptedDrafter

from jetflow import BestFirst, Chain, FanoutBestFirst, ParallelDrafter, SpeculativeDecoder, Target, load_head

NUM_RUNS = 99
# The reference does not shorten its last trees to what may still be kept, so ours must not come near the limit.
SLACK = 16


def make_drafter(run: dict, head, target):
    # `width` is that of the published rule; the others always look at the whole vocabulary.
    expander = {
        "jetspec_accum_logp": lambda: FanoutBestFirst(run["width"]),
        "ddtree_exact_top": BestFirst,
        "dflash_chain": Chain,
    }[run["expansion"]]()
    return ParallelDrafter(head, target, expander)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_generations_and_acceptance_lengths_equal_the_references(shared_fixtures, name):
    runs = json.loads((shared_fixtures / "decode_runs.json").read_text())
    assert len(runs) == NUM_RUNS
    target = Target.from_pretrained(str(shared_fixtures / f"target_{name}"), dtype=torch.float32)
    heads = {
        kind: load_head(str(shared_fixtures / f"head_{name}_{kind}"), dtype=torch.float32)
        for kind in ("causal", "bidirectional")
    }
    checked = 0
    for run in (run for run in runs if run["target"] == name):
        drafter = make_drafter(run, heads[run["head"]], target)
        decoder = SpeculativeDecoder(target, drafter, budget=run["budget"])
        limit = run["max_new_tokens"]
        result = decoder.generate(run["prompt"], max_new_tokens=limit)
        # All runs were seen to equal the target's greedy text; some rows repeat it.
        assert run["equals_autoregressive"]
        assert result.token_ids == run["token_ids"] == run.get("autoregressive", run["token_ids"]), run
        longer = decoder.generate(run["prompt"], max_new_tokens=limit + SLACK)
        rounds = longer.rounds[: len(run["accept_lengths"])]
        assert [stats.num_accepted + 1 for stats in rounds] == run["accept_lengths"], run
        if "tree_sizes" in run:
            assert [stats.num_nodes for stats in rounds] == run["tree_sizes"], run
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["perfect", "random", "wrong", "second_child"])
def test_scripted_drafts_change_no_text_of_the_trained_targets(shared_fixtures, name, kind):
    runs = json.loads((shared_fixtures / "decode_runs.json").read_text())
    target = Target.from_pretrained(str(shared_fixtures / f"target_{name}"), dtype=torch.float32)
    for prompt in {tuple(run["prompt"]) for run in runs if run["target"] == name}:
        expected = plain_greedy(target.model, list(prompt), 40)
        for budget in (1, 7, 31, 64):
            decoder = SpeculativeDecoder(target, ScriptedDrafter(kind, expected, len(prompt)), budget=budget)
            assert decoder.generate(prompt, max_new_tokens=40).token_ids == expected
