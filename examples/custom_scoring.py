"""Question: how do I put a scoring function of my own into the expander?

Command:  python examples/custom_scoring.py
Run time: under a minute on a CPU
Expected: other trees and another tau, the same text
"""

import json
from pathlib import Path

import torch

from jetflow import BestFirst, ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.scoring import EntropyGuided, Hybrid, cumulative_log_prob

MODELS = Path("models/tiny")


# --8<-- [start:scoring]
def bold(candidates):
    """Likes deep nodes: half a nat for each level, so that sure paths are followed further."""
    return candidates.cum_log_probs + 0.5 * candidates.depth


# --8<-- [end:scoring]

target = Target.from_pretrained(str(MODELS / "target"), dtype=torch.float32)
head = load_head(MODELS / "head", dtype=torch.float32)
lines = (MODELS / "heldout.jsonl").read_text().splitlines()[:8]
prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in lines]

texts = []
print("scoring function                    tau")
for name, scoring in {
    "cumulative log-probability": cumulative_log_prob,
    "hybrid, entropy weight 0.5": Hybrid(0.5),
    "entropy alone": EntropyGuided(),
    "bold (written here)": bold,
}.items():
    decoder = SpeculativeDecoder(target, ParallelDrafter(head, target, BestFirst(scoring)), budget=16)
    results = decoder.generate(prompts, max_new_tokens=160)
    rounds = [stats.num_kept for result in results for stats in result.rounds]
    texts.append([result.token_ids for result in results])
    print(f"{name:<32}{sum(rounds) / len(rounds):>7.2f}")
print("all texts equal:", all(text == texts[0] for text in texts))
