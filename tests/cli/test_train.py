"""From prompts to a published head with the commands alone, and what training refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from recipes import EAGLE, PAIR, RECIPE

pytest.importorskip("accelerate", reason="training needs jetflow[train]")
pytest.importorskip("matplotlib", reason="training needs jetflow[train]")

from jetflow.cli import main
from jetflow.cli.recipe import read_recipe
from jetflow.cli.recipe_checks import check_head_keys
from jetflow.heads.checkpoint import load_head
from jetflow.heads.window import WindowedLayers
from jetflow.training.checkpoints import checkpoints


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    out = folder / "answers.jsonl"
    arguments = ["--target", str(PAIR / "target"), "--prompts", str(PAIR / "heldout.jsonl"), "--num-prompts", "9"]
    assert main(["regenerate", *arguments, "--out", str(out), "--max-new-tokens", "24", "--dtype", "float32"]) == 0
    return out


def write_recipe(folder, answers, text=RECIPE, loss="forward-kl", **changes):
    text = text.format(target=PAIR / "target", answers=answers, prompts=PAIR / "heldout.jsonl", loss=loss)
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1, name
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


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


def test_a_head_to_start_from_may_have_the_correction(tmp_path, answers):
    """What counts is the head that is trained, not the recipe's own words."""
    recipe = write_recipe(tmp_path, answers, RECIPE.replace("num_anchors = 8", "num_anchors = 8\nmarginal_share = 0.5"))
    check_head_keys(read_recipe(recipe), SimpleNamespace(correction="gated", refinement=False))


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


def test_a_head_with_a_correction_is_trained_published_and_trained_on(tmp_path, answers):
    text = RECIPE.replace("num_layers = 1", "num_layers = 1\ncorrection = 'gated'\ncorrection_rank = 8")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 0
    head = load_head(tmp_path / "run" / "head")
    assert (head.config.correction, head.config.correction_rank) == ("gated", 8)
    assert head.correction.up.weight.abs().sum() > 0
    more = text.replace("correction = 'gated'", f"start_from = '{tmp_path / 'run' / 'head'}'\ncorrection = 'recurrent'")
    assert main(["train", str(write_recipe(tmp_path, answers, more)), "--out", str(tmp_path / "more")]) == 0
    assert load_head(tmp_path / "more" / "head").config.correction == "recurrent"
    card = (tmp_path / "more" / "head" / "README.md").read_text()
    assert "A recurrent correction of rank 8 lies in `correction/`" in card
    assert "They began with the head `run/head`." in card


def test_a_head_with_a_sliding_window_is_trained_published_and_trained_on(tmp_path, answers, capsys):
    text = RECIPE.replace("num_layers = 1", "num_layers = 2\nsliding_window = 20\nsliding_layers = [0]")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run" / "head"
    assert load_head(folder).config.window == WindowedLayers(20, (0,))
    assert "causal in the block, sliding window of 20 in layers 0" in (folder / "README.md").read_text()
    more = text.replace("sliding_window = 20\nsliding_layers = [0]", f"start_from = '{folder}'")
    assert main(["train", str(write_recipe(tmp_path, answers, more, steps=2)), "--out", str(tmp_path / "more")]) == 0
    assert load_head(tmp_path / "more" / "head").config.window == WindowedLayers(20, (0,))
    wrong = text.replace("sliding_window = 20", "sliding_window = 3")
    assert main(["train", str(write_recipe(tmp_path, answers, wrong)), "--out", str(tmp_path / "wrong")]) == 2
    assert "window.size=3 must be at least block_size=4" in capsys.readouterr().err


def test_muon_needs_whole_matrices(tmp_path, answers, capsys):
    text = "optimizer = 'muon'\n" + RECIPE.replace("steps = 4", "steps = 4\nshard_head = true")
    assert main(["train", str(write_recipe(tmp_path, answers, text)), "--out", str(tmp_path / "run")]) == 2
    assert "shard_head does not go with optimizer muon" in capsys.readouterr().err


def test_a_head_for_two_passes_from_its_recipe_to_its_text(tmp_path, answers, capsys):
    text = RECIPE.replace("block_size = 4", 'block_size = 4\nrefinement = true\ncorrection = "gated"\ncorrection_rank = 8')
    text = text.replace("num_anchors = 8", "num_anchors = 8\nfilled_share = 0.4").replace(
        "per_file = 2", "per_file = 1\npasses = 2"
    )
    recipe = write_recipe(tmp_path, answers, text, steps=2, checkpoint_every=2)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    head = tmp_path / "run" / "head"
    assert load_head(head).config.refinement
    assert "passes=2" in (head / "README.md").read_text()
    capsys.readouterr()
    arguments = [
        "--target",
        str(PAIR / "target"),
        "--prompt",
        "Tom has 3",
        "--max-new-tokens",
        "8",
        "--dtype",
        "float32",
        "--json",
    ]
    assert main(["generate", *arguments, "--head", str(head), "--passes", "2"]) == 0
    two_passes = json.loads(capsys.readouterr().out)
    assert main(["generate", *arguments, "--drafter", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == two_passes["token_ids"]
    # The published head of the tiny pair knows nothing of it.
    assert main(["generate", *arguments, "--head", str(PAIR / "head"), "--passes", "2"]) == 2
    assert "passes=2 needs a head that was trained with refinement=True" in capsys.readouterr().err


def test_an_eagle_head_is_trained_published_and_decodes(tmp_path, answers, capsys):
    text = EAGLE.replace("num_anchors = 8", "num_anchors = 8\nnum_unroll = 3").replace(
        "[data]", '[data]\nfeatures = "FEATURES"'
    )
    recipe = write_recipe(tmp_path, answers, text.replace("FEATURES", str(tmp_path / "states")))
    assert main(["features", str(recipe)]) == 0
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run" / "head"
    head = load_head(folder)
    assert (head.config.taps, head.config.draft_vocab_size, len(head.draft_tokens)) == ((0, 2, 3), 100, 100)
    assert "# An EAGLE-3 draft head for target" in (folder / "README.md").read_text()
    assert set(json.loads((folder / "result.json").read_text())["tau"]) == {"1", "8"}
    capsys.readouterr()
    arguments = ["generate", "--target", str(PAIR / "target"), "--prompt", "Hi", "--chat", "--max-new-tokens", "12", "--json"]
    texts = []
    for drafter in (["--drafter", "none"], ["--head", str(folder)]):
        assert main([*arguments, "--dtype", "float32", *drafter]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    assert main([*arguments, "--head", str(folder), "--frequent-tokens", "8"]) == 2
    assert "frequent_tokens.json" in capsys.readouterr().err
    assert main(["verify", "--target", str(PAIR / "target"), "--head", str(folder), "--prompts-file", str(answers)]) == 2
    assert "is an EAGLE-3 head" in capsys.readouterr().err
    bench = ["bench", "--target", str(PAIR / "target"), "--head", str(folder), "--max-new-tokens", "8", "--dtype", "float32"]
    bench += ["--data", str(PAIR / "heldout.jsonl"), "--count", "1", "--out", str(tmp_path / "bench.jsonl"), "--budgets", "6"]
    assert main([*bench, "--methods", "plain", "eagle"]) == 0
    assert "eagle@6" in capsys.readouterr().out
    assert main([*bench, "--methods", "head"]) == 2
    assert "--methods head needs a JetFlow or DFlash head" in capsys.readouterr().err
