"""Question: how are trees built, and what does an expander of my own look like?

Command:  python examples/tutorials/expanders.py
Run time: under a minute on a CPU
Expected: the best tree of three laws, drawn; then a table of expanders: other trees, another tau, the same text
"""

# --8<-- [start:laws]
import torch
from rich.console import Console

from jetflow import BestFirst, MarginalSource
from jetflow.trees.drawing import draw_tree

# Three laws over four tokens, for the depths 1, 2 and 3.
laws = torch.tensor([[[0.6, 0.3, 0.1, 0.0], [0.5, 0.4, 0.1, 0.0], [0.9, 0.1, 0.0, 0.0]]])
source = MarginalSource.from_logits(laws.log(), width=4)
tree = BestFirst()(torch.tensor([3]), source, budget=7)
Console(width=80).print(draw_tree(tree))
print(f"tau, if the target followed these laws: {tree.expected_acceptance_length().item():.2f}")
# --8<-- [end:laws]

# --8<-- [start:setup]
import json
import math

from jetflow import (
    Beam,
    Chain,
    FanoutBestFirst,
    ParallelDrafter,
    SpeculativeDecoder,
    Target,
    load_head,
)

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]
# --8<-- [end:setup]


# --8<-- [start:own]
class SureNodes:
    """The best tree without paths that the draft gives less than `floor`; nodes stand best first."""

    def __init__(self, floor):
        self.floor = floor
        self.best = BestFirst()

    def __call__(self, root_tokens, source, budget):
        tree = self.best(root_tokens, source, budget)
        return tree.first(int((tree.scores >= math.log(self.floor)).sum(dim=1).max()))


# --8<-- [end:own]

# --8<-- [start:use]
decoder = SpeculativeDecoder(target, ParallelDrafter(head, target), budget=1)
plain = decoder.generate(prompts, max_new_tokens=96)
for name, expander in {
    "chain": Chain(),
    "beam of 4": Beam(4),
    "published, 7 children": FanoutBestFirst(7),
    "best first": BestFirst(),
    "sure nodes": SureNodes(0.05),
}.items():
    decoder = SpeculativeDecoder(target, ParallelDrafter(head, target, expander), budget=32)
    results = decoder.generate(prompts, max_new_tokens=96)
    rounds = [stats for result in results for stats in result.rounds]
    tau = sum(stats.num_kept for stats in rounds) / len(rounds)
    nodes = sum(stats.num_nodes for stats in rounds) / len(rounds)
    same = [result.token_ids for result in results] == [result.token_ids for result in plain]
    print(f"{name:<22} tau {tau:5.2f}   nodes {nodes:5.2f}   same text: {same}")
# --8<-- [end:use]
