"""A small recipe on the tiny pair, and answers of its target to train on."""

import re
from pathlib import Path

from jetflow.cli import main

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "models" / "tiny"
RECIPE = """
[target]
name = "{target}"
dtype = "float32"

[data]
train = ["{answers}"]
max_length = 256
rows_per_step = 4

[head]
block_size = 4
num_layers = 1
taps = [0, 3]

[loss]
name = "{loss}"
num_anchors = 8

[train]
steps = 4
rows_per_pass = 2
warmup_steps = 1
checkpoint_every = 2
evaluate_every = 2

[evaluation]
prompts = ["{prompts}"]
per_file = 2
budgets = [1, 8]
max_new_tokens = 8
"""
EAGLE = RECIPE.replace(
    "block_size = 4\nnum_layers = 1\ntaps = [0, 3]", 'kind = "eagle3"\ndraft_vocab_size = 100\ntaps = [0, 2, 3]'
)


def write_answers(folder):
    """Nine short answers of the target; returns their file."""
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
