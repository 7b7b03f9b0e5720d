"""Question: how many nodes are worth verifying, and how do I decide that myself?

Command:  python examples/tutorials/budgets.py
Run time: under a minute on a CPU
Expected: larger budgets keep more tokens per pass; policies verify fewer nodes where they promise little; the text stays
"""

# --8<-- [start:setup]
import json

import torch

from jetflow import ParallelDrafter, SpeculativeDecoder, Target, ThroughputBudget, load_head

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]
# --8<-- [end:setup]

# --8<-- [start:measured]
# Seconds of a round by its size, as `make bench-tiny` measured them.
with open("results/tiny.json") as file:
    rows = json.load(file)["results"]
measured = {row["name"]: row["tau"] / row["tokens_per_second"] for row in rows}
round_seconds = {size: measured[f"JetFlow, budget {size}"] for size in (8, 16, 32, 64)}
# --8<-- [end:measured]


# --8<-- [start:own]
class Cautious:
    """Verifies few nodes while the last rounds accepted little, else all."""

    max_nodes = 32

    def __call__(self, scores, num_accepted):
        recent = num_accepted[-3:]
        return 6 if recent and sum(recent) / len(recent) < 8 else self.max_nodes


# --8<-- [end:own]

# --8<-- [start:use]
drafter = ParallelDrafter(head, target)
plain = SpeculativeDecoder(target, drafter, budget=1).generate(prompts, max_new_tokens=96)
for name, budget in {
    "8": 8,
    "32": 32,
    "by throughput": ThroughputBudget(round_seconds),
    "cautious": Cautious(),
}.items():
    results = SpeculativeDecoder(target, drafter, budget=budget).generate(prompts, max_new_tokens=96)
    rounds = [stats for result in results for stats in result.rounds]
    tau = sum(stats.num_kept for stats in rounds) / len(rounds)
    nodes = sum(stats.num_nodes for stats in rounds) / len(rounds)
    same = [result.token_ids for result in results] == [result.token_ids for result in plain]
    print(f"{name:<14} tau {tau:5.2f}   nodes {nodes:5.2f}   same text: {same}")
# --8<-- [end:use]
