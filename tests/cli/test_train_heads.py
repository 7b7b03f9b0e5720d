"""Heads of every kind from their recipe to their text: corrections, windows, several passes, EAGLE-3."""

import json

import pytest

pytest.importorskip("accelerate", reason="training needs jetflow[train]")
pytest.importorskip("matplotlib", reason="training needs jetflow[train]")

from recipes import EAGLE, PAIR, RECIPE, write_answers, write_recipe

from jetflow.cli import main
from jetflow.heads.checkpoint import load_head
from jetflow.heads.window import WindowedLayers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return write_answers(tmp_path_factory.mktemp("answers"))


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
