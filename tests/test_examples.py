"""The examples run as a reader would run them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> str:
    out = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_quickstart_gives_plain_text_in_fewer_passes():
    assert "the same text as plain decoding" in run("examples/quickstart.py")
    assert len((ROOT / "examples" / "quickstart.py").read_text().splitlines()) < 60


def test_custom_scoring_changes_no_text():
    assert "all texts equal: True" in run("examples/custom_scoring.py")


def test_the_recorded_round_is_the_one_in_the_docs(tmp_path):
    run("examples/record_round.py", str(tmp_path / "round.json"))
    made, shown = (json.loads(path.read_text()) for path in (tmp_path / "round.json", ROOT / "docs" / "assets" / "round.json"))
    assert (made["before"], made["accepted"], made["bonus"]) == (shown["before"], shown["accepted"], shown["bonus"])
    assert [node["text"] for node in made["nodes"][:16]] == [node["text"] for node in shown["nodes"][:16]]


def test_readme_shows_the_quickstart():
    code = (ROOT / "examples" / "quickstart.py").read_text().split("[start:compose]\n")[1].split("prompt = ")[0]
    assert code.strip() in (ROOT / "README.md").read_text()


def test_the_tiny_pair_is_trained_from_nothing(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    run("examples/train_tiny.py", "--smoke", "--out", str(out), "--work-dir", str(work))
    assert json.loads((out / "result.json").read_text())["same_as_autoregressive_16"] == "3/3"
    assert {path.name for path in out.iterdir()} == {"target", "head", "heldout.jsonl", "result.json", "README.md"}
