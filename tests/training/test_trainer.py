"""The trainer: exact accumulation, several processes, precisions, and settings that do not fit."""

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")

from small_run import BLOCK, assert_equal, run_script, small_head, small_rows, small_target, small_trainer, weights_of

from jetflow.losses import CrossEntropy, ForwardKL
from jetflow.training import StepSettings, UnrollSettings
from jetflow.training.optimizers import adamw
from jetflow.training.settings import TrainSettings
from jetflow.training.trainer import NonFiniteLossError

# Sums of a few thousand float32 terms in another order.
ATOL = 1e-6


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
