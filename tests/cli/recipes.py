"""Recipes that the tests of training change."""

from pathlib import Path

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
