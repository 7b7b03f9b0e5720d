"""Benchmarks with several prompts at a time, and the memory that they took."""

import json
from pathlib import Path

import pytest
import torch

from jetflow import Target
from jetflow.benchmark.memory import CLEAR, peak_bytes, reset_peak
from jetflow.benchmark.methods import HuggingFaceMethod
from jetflow.benchmark.tables import figures_of, read_results
from jetflow.cli import main

TINY = Path(__file__).parents[2] / "models" / "tiny"
METHODS = ["plain", "head", "lookup", "merged", "hf"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five conversations, the last two with two turns."""
    prompts = [json.loads(line)["prompt"] for line in (TINY / "heldout.jsonl").read_text().splitlines()[:5]]
    path = tmp_path_factory.mktemp("data") / "some.jsonl"
    turns = [[text] for text in prompts[:3]] + [[text, "Go on."] for text in prompts[3:]]
    path.write_text("\n".join(json.dumps({"id": f"a{number}", "turns": one}) for number, one in enumerate(turns)))
    return path


def bench(data, out, *more):
    arguments = ["--target", str(TINY / "target"), "--head", str(TINY / "head"), "--max-new-tokens", "24", "--dtype", "float32"]
    return main(["bench", *arguments, "--data", str(data), "--budgets", "8", "--out", str(out), *more])


def test_texts_of_batches_are_those_of_single_prompts(data, tmp_path, capsys):
    assert bench(data, tmp_path / "single.jsonl", "--methods", *METHODS) == 0
    assert bench(data, tmp_path / "batch.jsonl", "--methods", *METHODS, "--batch-size", "2") == 0
    (single, records), (batch, others) = (read_results([tmp_path / f"{name}.jsonl"]) for name in ("single", "batch"))
    assert "batch_size" not in single
    assert batch["batch_size"] == 2

    def texts(rows):
        return {(one["dataset"], one["task"], one["turn"], one["method"]): one["token_ids"] for one in rows}

    assert texts(records) == texts(others)
    assert len(others) == 7 * len(METHODS)
    # Those written together share their time.
    by_task = {(one["task"], one["turn"], one["method"]): one for one in others}
    first, second, third = (by_task[f"a{number}", 0, "head@8"] for number in range(3))
    assert first["seconds"] == second["seconds"] != third["seconds"]
    assert 0 < sum(first["phases"].values()) + sum(second["phases"].values()) <= 2 * first["seconds"]
    figures = {one.method: one for one in figures_of(batch, others)}
    assert figures["head@8"].tau == pytest.approx({one.method: one for one in figures_of(single, records)}["head@8"].tau)
    assert set(figures["head@8"].phases) == {"prefill", "draft", "build", "verify", "accept", "commit"}
    with pytest.raises(ValueError, match=r"has batch_size=2, but .* has None"):
        read_results([tmp_path / "single.jsonl", tmp_path / "batch.jsonl"])
    for options, message in (
        (["--batch-size", "0"], "--batch-size and --budgets must be at least 1"),
        (
            ["--batch-size", "2", "--methods", "head", "hf-lookup"],
            "hf-lookup writes one text at a time and needs --batch-size 1, got 2",
        ),
    ):
        assert bench(data, tmp_path / "none.jsonl", *options) == 2
        assert message in capsys.readouterr().err


def test_hugging_faces_batches_end_where_each_text_ends():
    target = Target.from_pretrained(str(TINY / "target"), dtype=torch.float32)
    method = HuggingFaceMethod(target)
    prompts = [target.chat_ids("Hello!"), target.chat_ids("Tina has 3 eggs and Jack has 6 times as many.")]
    together, alone = method(prompts, 160, 0), [method([prompt], 160, 0)[0] for prompt in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({len(one.token_ids) for one in alone}) == 2


@pytest.mark.skipif(not CLEAR.exists(), reason="this kernel does not tell the peak of a process's memory")
def test_a_peak_is_what_was_in_use_and_begins_anew(data, tmp_path):
    device = torch.device("cpu")
    reset_peak(device)
    before = peak_bytes(device)
    block = torch.ones(64, 2**20)
    assert 250 * 2**20 < peak_bytes(device) - before < 300 * 2**20
    del block
    reset_peak(device)
    assert peak_bytes(device) - before < 20 * 2**20
    assert bench(data, tmp_path / "run.jsonl", "--methods", "head", "--count", "1") == 0
    _, one = figures_of(*read_results([tmp_path / "run.jsonl"]))
    assert 2**27 < one.peak_bytes <= peak_bytes(device) + 2**30
