"""`jetflow verify` on the tiny pair: a certificate, and a failure that shows."""

import json
from pathlib import Path

import pytest

from jetflow.acceptors import rejection
from jetflow.cli import main

TINY = Path(__file__).parents[2] / "models" / "tiny"


def verify(out, *more):
    arguments = ["--target", str(TINY / "target"), "--head", str(TINY / "head"), "--prompts-file", str(TINY / "heldout.jsonl")]
    return main(["verify", *arguments, "--num-prompts", "2", "--max-new-tokens", "24", "--out", str(out), *more])


def test_the_tiny_pair_passes(tmp_path, capsys):
    assert verify(tmp_path / "c.json", "--rounds", "8000") == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["passed"]
    assert found["greedy"] == {"texts": 2, "equal": 2, "divergences": []}
    assert {one["rule"] for one in found["laws"]["tests"]} >= {"match", "traversal", "block", "recursive rejection"}
    assert set(found["versions"]) == {"jetflow", "torch", "transformers"}
    assert "2 of 2 texts equal" in capsys.readouterr().err


def test_a_wrong_rule_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rejection, "residual", lambda target, draft: target)
    assert verify(tmp_path / "c.json", "--rounds", "8000") == 1
    assert "FAILED" in capsys.readouterr().err
    failed = [o for o in json.loads((tmp_path / "c.json").read_text())["laws"]["tests"] if o["p_value"] < 1e-6]
    assert {one["rule"] for one in failed} <= {"recursive rejection", "recursive rejection with replacement"}
    assert failed


def test_bfloat16_differences_are_explained_or_not(tmp_path):
    assert verify(tmp_path / "c.json", "--dtype", "bfloat16", "--rounds", "2000") == 0
    greedy = json.loads((tmp_path / "c.json").read_text())["greedy"]
    assert greedy["equal"] + len(greedy["divergences"]) == 2
    assert all(one["explained"] for one in greedy["divergences"])


@pytest.mark.parametrize(
    ("option", "message"), [("--num-prompts", "--num-prompts must be at least 1"), ("--rounds", "--rounds must be at least 1")]
)
def test_bad_numbers_are_named(tmp_path, capsys, option, message):
    assert verify(tmp_path / "c.json", option, "0") == 2
    assert message in capsys.readouterr().err
