"""From prompts to a published head with the commands alone, and what a run refuses."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")
pytest.importorskip("matplotlib", reason="training needs jetflow[train]")

from recipes import PAIR, RECIPE, write_answers, write_recipe

from jetflow.cli import main
from jetflow.heads.checkpoint import load_head
from jetflow.training.checkpoints import checkpoints


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return write_answers(tmp_path_factory.mktemp("answers"))


def test_from_prompts_to_a_published_head(tmp_path, answers, capsys):
    recipe = write_recipe(tmp_path, answers)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    head = load_head(tmp_path / "run" / "head")
    assert head.fc.weight.dtype == torch.bfloat16
    assert (head.config.block_size, head.config.taps, head.config.causal) == (4, (0, 3), True)
    result = json.loads((tmp_path / "run" / "head" / "result.json").read_text())
    assert result["num_steps"] == 4
    assert result["tau"]["1"] == 1.0
    assert list(result["data_sha256"]) == ["answers.jsonl"]
    assert (tmp_path / "run" / "head" / "curves.png").stat().st_size > 1000
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    assert "1 layers, block size 4, causal" in card
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2, 2, 3, 4, 4]
    assert [one["step"] for one in records if "tau" in one] == [2, 4]
    assert "tau@1 1.00" in capsys.readouterr().err
    # Serving it is one command.
    arguments = ["generate", "--target", str(PAIR / "target"), "--head", str(tmp_path / "run" / "head"), "--prompt", "Hi"]
    assert main([*arguments, "--chat", "--max-new-tokens", "4"]) == 0
    # The finished run starts anew from its end and writes the same head.
    weights = load_head(tmp_path / "run" / "head").state_dict()
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    assert all(torch.equal(value, weights[name]) for name, value in load_head(tmp_path / "run" / "head").state_dict().items())


def test_torchrun_trains_one_head_and_writes_one_record(tmp_path, answers):
    recipe = write_recipe(tmp_path, answers)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29543",
        "-m",
        "jetflow",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "train", str(recipe), "--out", str(tmp_path / "two")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert main(["train", str(recipe), "--out", str(tmp_path / "one")]) == 0
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two"))
    assert [record["step"] for record in two] == [record["step"] for record in one] == [1, 2, 2, 3, 4, 4]
    load_head(tmp_path / "two" / "head")


def test_stopped_run_goes_on_and_its_records_do_not_repeat(tmp_path, answers):
    recipe = write_recipe(tmp_path, answers)
    assert main(["train", str(recipe), "--out", str(tmp_path / "whole")]) == 0
    assert main(["train", str(recipe), "--out", str(tmp_path / "parts")]) == 0
    # As if it had been killed after step 3: the newest checkpoint is that of step 2.
    shutil.rmtree(checkpoints(tmp_path / "parts" / "checkpoints")[-1])
    assert main(["train", str(recipe), "--out", str(tmp_path / "parts")]) == 0
    one, other = (
        [json.loads(line)["step"] for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("whole", "parts")
    )
    assert one == other
    whole, parts = (load_head(tmp_path / name / "head").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    "loss", ["cross-entropy", "reverse-kl", "jensen-shannon", "total-variation", "log-acceptance", "tree-acceptance"]
)
def test_every_loss_trains(tmp_path, answers, loss):
    recipe = write_recipe(tmp_path, answers, loss=loss, steps=1, checkpoint_every=1, per_file=1)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0


def test_training_from_cached_states(tmp_path, answers):
    features = tmp_path / "states"
    text = RECIPE.replace("rows_per_step = 4", f'rows_per_step = 4\nfeatures = "{features}"')
    recipe = write_recipe(tmp_path, answers, text)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert main(["features", str(recipe)]) == 0
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0


def test_warm_start_from_a_head_that_exists(tmp_path, answers):
    text = RECIPE.replace("[head]", f'[head]\nstart_from = "{PAIR / "head"}"').replace("taps = [0, 3]\n", "")
    recipe = write_recipe(tmp_path, answers, text, block_size=6)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    head = load_head(tmp_path / "run" / "head")
    assert (head.config.block_size, head.config.num_layers, head.config.taps) == (6, 1, (0, 2, 4))


def test_sampled_vocabulary_muon_packing_and_average(tmp_path, answers, capsys):
    text = "optimizer = 'muon'\n" + RECIPE.replace("num_anchors = 8", "num_anchors = 8\nnum_frequent = 64\nnum_random = 32")
    text = text.replace("rows_per_step = 4", "rows_per_step = 4\npack = true").replace(
        "steps = 4", "steps = 4\nema_decay = 0.9"
    )
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 0
    head = str(tmp_path / "run" / "head")
    arguments = [
        "generate",
        "--target",
        str(PAIR / "target"),
        "--head",
        head,
        "--prompt",
        "Hi",
        "--chat",
        "--max-new-tokens",
        "4",
    ]
    assert main([*arguments, "--frequent-tokens", "50"]) == 0
    assert main([*arguments, "--frequent-tokens", "65"]) == 2
    assert "count must be in [1, 64]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mean-squares"}, r"name must be one of cross-entropy, .*got 'mean-squares'"),
        ({"dtype": '"int3"'}, "dtype must be one of float32, bfloat16, float16, got 'int3'"),
        ({"taps": "[0, 9]"}, "layer 9 must be in"),
    ],
)
def test_unknown_parts_are_named(tmp_path, answers, capsys, changes, message):
    recipe = write_recipe(tmp_path, answers, **changes)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("per_file = 2", "per_file = 2\npasses = 2", "[evaluation] passes=2 needs [head] refinement = true"),
        ("num_anchors = 8", "num_anchors = 8\nfilled_share = 0.5", "[loss] filled_share=0.5 needs [head] refinement = true"),
        ("num_anchors = 8", "num_anchors = 8\nmarginal_share = 0.25", "[loss] marginal_share=0.25 needs [head] correction"),
        ("num_layers = 1", "correction_rank = 8", "[head] correction_rank=8 needs [head] correction"),
    ],
)
@pytest.mark.parametrize("start_from", [False, True])
def test_keys_that_the_head_has_no_use_for_are_refused_before_training(
    tmp_path, answers, capsys, old, new, message, start_from
):
    text = RECIPE.replace(old, new)
    if start_from:
        text = re.sub(r"(?m)^(block_size|num_layers|taps) = .*\n", "", text)
        text = text.replace("[head]\n", f"[head]\nstart_from = '{PAIR / 'head'}'\n")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_mask_token_must_exist(tmp_path, answers, capsys):
    text = RECIPE.replace("num_layers = 1", "num_layers = 1\nmask_token = '<nothing>'")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 2
    assert "mask_token '<nothing>' is no token" in capsys.readouterr().err


def test_prompts_without_answers_are_no_training_data(tmp_path, capsys):
    recipe = write_recipe(tmp_path, PAIR / "heldout.jsonl")
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "holds prompts without answers" in capsys.readouterr().err


def test_tensorboard_that_is_not_installed_is_a_clear_error(tmp_path, answers, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recipe = write_recipe(tmp_path, answers, "tensorboard = true\n" + RECIPE)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "needs the tensorboard package" in capsys.readouterr().err


def test_tensorboard_holds_every_step_and_tau(tmp_path, answers):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    recipe = write_recipe(tmp_path, answers, "tensorboard = true\n" + RECIPE)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [(one["step"], one["loss"]) for one in steps if "loss" in one]
    assert [one.step for one in found.Scalars("loss")] == [step for step, _ in losses]
    assert all(abs(one.value - loss) < 1e-4 for one, (_, loss) in zip(found.Scalars("loss"), losses, strict=True))
    assert any(tag.startswith("tau/") for tag in found.Tags()["scalars"])


def test_muon_needs_whole_matrices(tmp_path, answers, capsys):
    text = "optimizer = 'muon'\n" + RECIPE.replace("steps = 4", "steps = 4\nshard_head = true")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 2
    assert "shard_head does not go with optimizer muon" in capsys.readouterr().err
