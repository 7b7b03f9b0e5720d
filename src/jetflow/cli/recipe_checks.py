"""What a recipe must not say: keys that its kind of head, its loss or its head has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetflow.cli.recipe import LossSection, Recipe

# Keys that only one kind of head has.
BLOCK_KEYS = (
    "head.block_size", "head.num_layers", "head.mask_token", "head.mask_token_id", "head.causal", "head.sliding_window",
    "head.sliding_layers", "head.correction", "head.correction_rank", "head.refinement", "head.start_from",
    "loss.num_frequent", "loss.num_random", "loss.marginal_share", "loss.filled_share",
)  # fmt: skip
EAGLE_KEYS = ("head.fc_norm", "head.norm_output", "head.draft_vocab_size", "loss.num_unroll")


def check_recipe(recipe: Recipe, path: Path) -> None:
    """Raises ValueError for what can be told without the head: numbers out of range, and keys that nothing reads."""
    kind, loss, passes = recipe.head.kind, recipe.loss, recipe.evaluation.passes
    if kind not in ("block", "eagle3"):
        raise ValueError(f"{path}: [head] kind must be block or eagle3, got {kind!r}")
    if loss.num_frequent is not None and loss.num_frequent < 1:
        raise ValueError(f"{path}: [loss] num_frequent must be at least 1, got {loss.num_frequent}")
    if passes < 1:
        raise ValueError(f"{path}: [evaluation] passes must be at least 1, got {passes}")
    if kind == "eagle3" and passes != 1:
        raise ValueError(
            f"{path}: [evaluation] passes={passes} must be 1 for a head of kind eagle3, which steps once per level"
        )
    for name in EAGLE_KEYS if kind == "block" else BLOCK_KEYS:
        section, key = name.split(".")
        if getattr(getattr(recipe, section), key) is not None:
            raise ValueError(f"{path}: [{section}] {key} has no meaning for a head of kind {kind}")
    if loss.num_random is not None and loss.num_frequent is None:
        raise ValueError(f"{path}: [loss] num_random={loss.num_random} needs num_frequent, which asks for a sample")
    if recipe.head.sliding_layers is not None and recipe.head.sliding_window is None:
        raise ValueError(f"{path}: [head] sliding_layers={recipe.head.sliding_layers} needs sliding_window")
    _check_tree_keys(loss, path)


def _check_tree_keys(loss: LossSection, path: Path) -> None:
    for key in ("tree_budget", "tree_temperature"):
        value = getattr(loss, key)
        if value is not None and loss.tree_weight == 0 and loss.name != "tree-acceptance":
            raise ValueError(
                f"{path}: [loss] {key}={value} needs tree_weight above 0 or name = 'tree-acceptance', got "
                f"tree_weight={loss.tree_weight}, name={loss.name!r}"
            )


def check_head_keys(recipe: Recipe, config: Any) -> None:
    """Raises ValueError for keys that the head to be trained has no use for.

    Args:
        recipe: the recipe.
        config: of the head, which may have come from `start_from`.
    """
    correction, refinement = getattr(config, "correction", None), getattr(config, "refinement", False)
    if correction is None:
        for section, key in (("head", "correction_rank"), ("loss", "marginal_share")):
            value = getattr(getattr(recipe, section), key)
            if value is not None:
                raise ValueError(f"[{section}] {key}={value} needs [head] correction, which this head does not have")
    if refinement:
        return
    if recipe.loss.filled_share is not None:
        raise ValueError(f"[loss] filled_share={recipe.loss.filled_share} needs [head] refinement = true")
    if recipe.evaluation.passes > 1:
        raise ValueError(f"[evaluation] passes={recipe.evaluation.passes} needs [head] refinement = true")
