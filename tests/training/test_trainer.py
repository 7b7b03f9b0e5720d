"""The trainer: exact accumulation, exact restarts after kills at any moment, several processes, and clean stops."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")

from small_run import BLOCK, small_head, small_rows, small_target, small_trainer

from jetflow.losses import CrossEntropy, ForwardKL
from jetflow.training import StepSettings, UnrollSettings
from jetflow.training.checkpoints import checkpoints, last_checkpoint
from jetflow.training.optimizers import adamw, muon
from jetflow.training.settings import TrainSettings
from jetflow.training.trainer import NonFiniteLossError

SCRIPT = str(Path(__file__).with_name("small_run.py"))
# Sums of a few thousand float32 terms in another order.
ATOL = 1e-6


def weights_of(trainer):
    return trainer.finished_head(torch.float32).state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def run_script(folder, *arguments, kill_after=None, processes=1):
    """Runs the small run as a process of its own; kills it after so many seconds."""
    command = [sys.executable, SCRIPT]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "29541"]
        command.append(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(folder), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if kill_after is not None:
        # Counted from the first step, whatever the start took.
        process.stdout.readline()
        time.sleep(kill_after)
        process.kill()
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.parametrize("eagle", [False, True], ids=["block", "eagle"])
def test_loss_falls_and_every_parameter_moves(tmp_path, eagle):
    trainer = small_trainer(tmp_path, steps=30, eagle=eagle)
    before = {name: value.clone() for name, value in weights_of(trainer).items()}
    target_before = {name: value.clone() for name, value in trainer.target.model.state_dict().items()}
    reports = []
    trainer.on_step = reports.append
    trainer.run()
    assert reports[-1].loss < reports[0].loss
    assert [report.step for report in reports] == list(range(1, 31))
    for name, value in weights_of(trainer).items():
        assert not torch.equal(value, before[name]), name
    for name, value in trainer.target.model.state_dict().items():
        assert torch.equal(value, target_before[name]), name
    assert trainer.head.training


@pytest.mark.parametrize("kind", [{}, {"refinement": True}, {"eagle": True}], ids=["plain", "refinement", "eagle"])
@pytest.mark.parametrize("pack", [False, True])
def test_accumulation_equals_the_big_batch(tmp_path, pack, kind):
    grads, losses = [], []
    for size in (8, 4, 1):
        trainer = small_trainer(tmp_path, rows=small_rows(pack=pack), rows_per_pass=size, clip_norm=1e9, steps=1, **kind)
        kept = []

        def keep(closure=None, trainer=trainer, kept=kept):
            if not kept:
                kept.extend(weight.grad.clone() for weight in trainer.head.parameters())

        trainer.optimizers[0].step = keep
        losses.append(trainer._one_step().loss)
        grads.append(kept)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    for other in grads[1:]:
        for one, two in zip(grads[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=ATOL, rtol=1e-5)


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
        run_script(tmp_path / "killed", "--steps", str(steps), kill_after=generator.uniform(0.0, 0.25))
        assert not (tmp_path / "killed" / "end.pt").exists()
    code, output = run_script(tmp_path / "killed", "--steps", str(steps))
    assert code == 0, output
    ends = [torch.load(tmp_path / name / "end.pt")["weights"] for name in ("whole", "killed")]
    assert_equal(*ends)


@pytest.mark.parametrize("shard", [(), ("--shard",), ("--eagle",)], ids=["copies", "sharded", "eagle"])
def test_two_processes_train_like_one(tmp_path, shard):
    kind = shard if shard == ("--eagle",) else ()
    code, output = run_script(tmp_path / "one", "--steps", "6", *kind)
    assert code == 0, output
    code, output = run_script(tmp_path / "two", "--steps", "6", "--rows-per-pass", "2", *shard, processes=2)
    assert code == 0, output
    one, two = (torch.load(tmp_path / name / "end.pt") for name in ("one", "two"))
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=1e-4, rtol=0)


def test_sharding_needs_several_processes(tmp_path):
    with pytest.raises(ValueError, match="sharding needs several processes; start with torchrun"):
        small_trainer(tmp_path, shard_head=True)


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


def test_nan_loss_stops_with_the_batch_saved(tmp_path):
    class Broken:
        uses_target = False
        calls = 0

        def __call__(self, draft_logits, target_logits, labels):
            self.calls += 1
            values = CrossEntropy()(draft_logits, target_logits, labels)
            return values * float("nan") if self.calls == 3 else values

    trainer = small_trainer(tmp_path, step_settings=StepSettings(Broken()))
    with pytest.raises(NonFiniteLossError, match="loss of step 3 is nan"):
        trainer.run()
    saved = torch.load(tmp_path / "nonfinite-step-3-rank-0.pt")
    assert saved["batch"]["token_ids"].shape[0] == 8
    assert saved["anchors"].shape == saved["valid"].shape


def test_evaluation_gets_the_average_in_the_targets_dtype(tmp_path):
    trainer = small_trainer(tmp_path, steps=4, ema_decay=0.9, evaluate_every=2)
    seen = []
    trainer.on_evaluation = lambda step, head: seen.append((step, head.fc.weight.clone(), head.training))
    trainer.run()
    assert [step for step, _, _ in seen] == [2, 4]
    assert not any(training for _, _, training in seen)
    assert not torch.equal(seen[-1][1], trainer.head.fc.weight)
    assert trainer.head.training


def test_activation_checkpointing_changes_nothing(tmp_path):
    ends = []
    for on in (False, True):
        trainer = small_trainer(tmp_path / str(on), steps=3, activation_checkpointing=on)
        trainer.run()
        ends.append(weights_of(trainer))
    assert_equal(*ends)


def test_learning_rate_rises_and_falls():
    settings = TrainSettings(steps=110, warmup_steps=10, min_lr_ratio=0.1)
    factors = [settings.rate_factor(step) for step in range(110)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[60] == pytest.approx(0.55)
    assert factors == [*factors[:10], *sorted(factors[10:], reverse=True)]
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"precision": "int8"}, "precision must be float32 or bfloat16, got 'int8'"),
        ({"ema_decay": 1.0}, "ema_decay must be in"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio=2.0"),
    ],
)
def test_settings_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**({"steps": 5} | changes))


def test_half_precision_weights_are_refused(tmp_path):
    target = small_target()
    trainer = small_trainer(tmp_path)
    with pytest.raises(ValueError, match="head must hold float32 weights"):
        type(trainer)(
            small_head(target).bfloat16(), target, small_rows(), folder=tmp_path, settings=trainer.settings,
            step_settings=StepSettings(ForwardKL()),
        )  # fmt: skip


def test_bfloat16_autocast_keeps_float32_weights(tmp_path):
    trainer = small_trainer(tmp_path, precision="bfloat16", steps=2)
    trainer.run()
    assert trainer.head.fc.weight.dtype == torch.float32
    assert trainer.head.config.block_size == BLOCK
    assert adamw(trainer.head, 0.1)[0].param_groups[0]["peak_lr"] == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": True, "shard_head": True}, "shard_head must be False for an EAGLE-3 head"),
        ({"eagle": True, "activation_checkpointing": True}, "activation_checkpointing must be False for an EAGLE-3 head"),
        (
            {"eagle": True, "step_settings": StepSettings(ForwardKL())},
            "of a EagleHead must be UnrollSettings, got StepSettings",
        ),
        ({"step_settings": UnrollSettings(ForwardKL())}, "of a BlockDraftHead must be StepSettings, got UnrollSettings"),
    ],
)
def test_settings_of_the_other_kind_of_head_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        small_trainer(tmp_path, **changes)
