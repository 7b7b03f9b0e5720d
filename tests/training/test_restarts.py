"""Restarts of the trainer: bit for bit the same after kills at any moment, clean stops, damaged and pruned checkpoints."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")

from small_run import assert_equal, run_script, small_rows, small_trainer, weights_of

from jetflow.training.checkpoints import checkpoints, last_checkpoint
from jetflow.training.optimizers import muon

SCRIPT = str(Path(__file__).with_name("small_run.py"))


@pytest.mark.parametrize(
    "changes", [{}, {"ema_decay": 0.9}, {"rows_per_pass": 3}, {"eagle": True, "ema_decay": 0.9}], ids="-".join
)
def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path, changes):
    whole = small_trainer(tmp_path / "whole", steps=9, **changes)
    whole.run()
    first = small_trainer(tmp_path / "parts", steps=9, **changes)
    first.on_step = lambda report: first.stop() if report.step == 4 else None
    first.run()
    assert first.stopped
    assert first.step == 5
    second = small_trainer(tmp_path / "parts", steps=9, **changes)
    assert second.resume()
    assert second.step == 5
    second.run()
    assert_equal(weights_of(second), weights_of(whole))


def test_muon_resumes_exactly(tmp_path):
    ends = []
    for stop in (None, 3):
        folder = tmp_path / str(stop)
        for _ in range(2):
            trainer = small_trainer(folder, steps=6)
            trainer.optimizers = muon(trainer.head, 1e-2)
            trainer.resume()
            if stop is not None and trainer.step == 0:
                trainer.on_step = lambda report, trainer=trainer: trainer.stop() if report.step == 2 else None
            trainer.run()
        ends.append(weights_of(trainer))
    assert_equal(*ends)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(tmp_path, kills):
    steps = 12 * kills
    code, output = run_script(tmp_path / "whole", "--steps", str(steps))
    assert code == 0, output
    generator = random.Random(kills)
    for _ in range(kills):
        moment = generator.randint(1, 8), generator.uniform(0.0, 0.01)
        run_script(tmp_path / "killed", "--steps", str(steps), kill_after=moment)
        assert not (tmp_path / "killed" / "end.pt").exists()
    code, output = run_script(tmp_path / "killed", "--steps", str(steps))
    assert code == 0, output
    ends = [torch.load(tmp_path / name / "end.pt")["weights"] for name in ("whole", "killed")]
    assert_equal(*ends)


def test_sigterm_saves_and_ends_cleanly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(tmp_path), "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    last = int(output.strip().split("\n")[-1].split()[0])
    assert last_checkpoint(tmp_path / "checkpoints").name == f"step-{last:08d}"


def test_other_settings_or_data_do_not_go_on(tmp_path):
    small_trainer(tmp_path, steps=2).run()
    assert small_trainer(tmp_path, steps=4, evaluate_every=1, rows_per_pass=2).resume()
    for changes, message in (
        ({"learning_rate": 1e-3}, "was written with learning_rate 0.01, this run has 0.001"),
        ({"rows": small_rows(rows_per_step=4)}, "was written with rows"),
    ):
        with pytest.raises(ValueError, match=message):
            small_trainer(tmp_path, steps=4, **changes).resume()


def test_damaged_checkpoint_is_named(tmp_path):
    small_trainer(tmp_path, steps=2).run()
    file = last_checkpoint(tmp_path / "checkpoints") / "state.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is damaged .* delete it to go on from the one before"):
        small_trainer(tmp_path, steps=4).resume()


def test_checkpoints_are_pruned(tmp_path):
    trainer = small_trainer(tmp_path, steps=9, checkpoint_every=2, keep_last=2)
    trainer.run()
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-00000008", "step-00000009"]


def test_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, steps=6)
    trainer.on_step = lambda report: break_disk() if report.step == 3 else None

    def break_disk():
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)

    with pytest.raises(OSError, match=r"step 4 could not be written .*No space left.*last whole checkpoint is .*step-00000002"):
        trainer.run()
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    again = small_trainer(tmp_path, steps=6)
    assert again.resume()
    assert again.step == 2
