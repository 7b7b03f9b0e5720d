"""Every ablation runs at toy sizes and writes what the docs show; intervals and gains are those of the cells."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "ablations"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("lab", "options", "report"))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_from_training_to_its_chart(name, work, tmp_path):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--smoke", "--work-dir", str(work), "--out", str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["conclusions"]
    assert all((tmp_path / f"{chart}.svg").read_text().startswith("<svg") for chart in report["charts"])
    assert report["conclusions"][-1] in (tmp_path / f"{name}.md").read_text()
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 150


def test_another_target_with_conversations_of_ones_own(tmp_path):
    lines = [json.dumps({"prompt": f"Write {number}.", "answer": f"{number}"}) for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "bare.jsonl").write_text(json.dumps({"prompt": "Write 1."}))
    command = [sys.executable, str(FOLDER / "training_data.py"), "--smoke", "--work-dir", str(tmp_path / "work")]
    command += ["--num-layers", "2", "--heldout", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path), "--prompts"]
    out = subprocess.run([*command, str(tmp_path / "prompts.jsonl")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    assert json.loads((tmp_path / "training_data.json").read_text())["settings"]["num_layers"] == 2
    out = subprocess.run([*command, str(tmp_path / "bare.jsonl")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "needs an `answer`" in out.stderr


def test_quick_runs_are_small_and_train_anew(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import options

    monkeypatch.setattr(options, "ROOT", tmp_path)
    (tmp_path / "runs/lab-quick/head-of-before").mkdir(parents=True)
    (tmp_path / "runs/lab-quick/greedy-answers").touch()
    monkeypatch.setattr(sys, "argv", ["losses.py", "--quick", "--seeds", "2"])
    args = options.arguments("")
    lab = options.make_lab(args)
    assert (args.seeds, lab.steps, lab.num_answers, lab.num_heldout) == (2, 100, 1000, 20)
    assert [path.name for path in lab.work.iterdir()] == ["greedy-answers"]


@pytest.mark.parametrize("more", [["--smoke"], ["--work-dir", "runs/lab"]])
def test_quick_refuses_what_it_cannot_honour(more, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    import options

    monkeypatch.setattr(sys, "argv", ["losses.py", "--quick", *more])
    with pytest.raises(SystemExit):
        options.arguments("")
    assert "--quick" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "ablations").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_those_of_whole_runs(path):
    report = json.loads(path.read_text())
    assert report["command"].startswith(f"python examples/ablations/{path.stem}.py")
    assert not {"--smoke", "--quick"} & set(report["command"].split())
    cells = report.get("cells", [])
    for figure in report.get("figures", []):
        mine = [one for one in cells if (one["variant"], one["budget"], one["temperature"]) == (
            figure["variant"], figure["budget"], figure["temperature"])]  # fmt: skip
        assert len(mine) == report["settings"]["seeds"]
        tau = sum(sum(one["kept"]) for one in mine) / sum(sum(one["rounds"]) for one in mine)
        assert tau == pytest.approx(figure["tau"], abs=1e-3)
        assert figure["interval"][0] <= tau <= figure["interval"][1]


def test_intervals_are_paired(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from lab import Cell
    from report import Taus

    # Prompts differ much, but one variant always keeps twice as much as the other.
    kept = [[10 * (prompt + 1) + seed for prompt in range(8)] for seed in range(3)]
    cells = [
        Cell(name, seed, 16, 0.0, [factor * one for one in kept[seed]], [10] * 8)
        for name, factor in (("one", 1), ("two", 2))
        for seed in range(3)
    ]
    taus = Taus(cells)
    assert taus.tau("one", 16) == pytest.approx(4.6)
    low, high = taus.interval("one", 16)
    assert low < 4.0
    assert high > 5.2
    assert taus.gain("two", "one", 16) == pytest.approx((1.0, 1.0, 1.0))
    assert taus.by_seed("two", 16) == pytest.approx([9.0, 9.2, 9.4])
