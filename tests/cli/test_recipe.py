"""Recipes: what is read, and what is refused before anything is loaded."""

from types import SimpleNamespace

import pytest
import tomllib
from recipes import EAGLE, RECIPE, ROOT, write_recipe

from jetflow.cli.recipe import read_recipe
from jetflow.cli.recipe_checks import check_head_keys


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[loss]", "[losses]", r"\[losses\] is no section; known are target, data"),
        ("steps = 4", "step = 4", r"\[train\] has the key 'step', which is unknown; known are steps"),
        ("steps = 4", "steps = 'four'", r"\[train\] steps must be int, got 'four'"),
        ("steps = 4", "steps = true", r"\[train\] steps must be int, got True"),
        ("steps = 4", "steps = 0", "steps must be at least 1, got 0"),
        ("steps = 4\n", "", r"\[train\]: missing 1 required positional argument: 'steps'"),
        ("taps = [0, 3]", "taps = 3", r"taps must be list\[int\] \| None, got 3"),
        ("num_anchors = 8", "num_anchors = 8\nnum_frequent = 0", "num_frequent must be at least 1, got 0"),
        ("[target]", "[target", "is not TOML"),
    ],
)
def test_recipe_errors_name_file_section_and_key(tmp_path, old, new, message):
    path = tmp_path / "recipe.toml"
    assert old in RECIPE
    path.write_text(RECIPE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_a_head_to_start_from_may_have_the_correction(tmp_path):
    """What counts is the head that is trained, not the recipe's own words."""
    recipe = write_recipe(tmp_path, "answers.jsonl", RECIPE.replace("num_anchors = 8", "num_anchors = 8\nmarginal_share = 0.5"))
    check_head_keys(read_recipe(recipe), SimpleNamespace(correction="gated", refinement=False))


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read(path):
    recipe = read_recipe(path)
    assert recipe.train.steps > 0
    assert tomllib.loads(path.read_text())["target"]["name"] == recipe.target.name


@pytest.mark.parametrize(
    ("text", "new", "message"),
    [
        (EAGLE, "block_size = 4", r"\[head\] block_size has no meaning for a head of kind eagle3"),
        (EAGLE, "causal = false", r"\[head\] causal has no meaning for a head of kind eagle3"),
        (RECIPE, "fc_norm = true", r"\[head\] fc_norm has no meaning for a head of kind block"),
        (RECIPE, "kind = 'eagle2'", "kind must be block or eagle3, got 'eagle2'"),
        (EAGLE, "[loss]\nnum_random = 32", r"\[loss\] num_random has no meaning for a head of kind eagle3"),
        (EAGLE, "[loss]\nmarginal_share = 0.5", r"\[loss\] marginal_share has no meaning for a head of kind eagle3"),
        (EAGLE, "[loss]\nfilled_share = 0.5", r"\[loss\] filled_share has no meaning for a head of kind eagle3"),
        (RECIPE, "sliding_layers = [0]", r"\[head\] sliding_layers=\[0\] needs sliding_window"),
        (RECIPE, "[loss]\nnum_random = 32", r"\[loss\] num_random=32 needs num_frequent"),
        (
            RECIPE,
            "[loss]\ntree_budget = 16",
            r"\[loss\] tree_budget=16 needs tree_weight above 0 or name = 'tree-acceptance', got ",
        ),
        (RECIPE, "[loss]\ntree_temperature = 0.0", r"\[loss\] tree_temperature=0.0 needs tree_weight above 0"),
        (RECIPE, "[loss]\ntree_weight = 0.0\ntree_budget = 8", r"tree_budget=8 needs tree_weight above 0.*tree_weight=0.0"),
        (EAGLE, "[evaluation]\npasses = 2", r"\[evaluation\] passes=2 must be 1 for a head of kind eagle3"),
        (RECIPE, "[evaluation]\npasses = 0", r"\[evaluation\] passes must be at least 1, got 0"),
    ],
)
def test_keys_that_nothing_reads_are_refused(tmp_path, text, new, message):
    path = tmp_path / "recipe.toml"
    if new.startswith("["):
        section = new.split("\n")[0]
        path.write_text(text.replace(section, new))
    else:
        path.write_text(text.replace("[loss]", f"{new}\n\n[loss]"))
    with pytest.raises(ValueError, match=message):
        read_recipe(path)
