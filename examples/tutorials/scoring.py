"""Question: how do I put a scoring function of my own into the expander?

Command:  python examples/tutorials/scoring.py
Run time: under a minute on a CPU
Expected: other trees and another tau, the same text
"""

# --8<-- [start:setup]
import json

import torch

from jetflow import BestFirst, ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.scoring import DepthPenalty, EntropyGuided, Hybrid, cumulative_log_prob

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]
# --8<-- [end:setup]


# --8<-- [start:own]
def bold(candidates):
    """Likes deep nodes, so that sure paths are followed further."""
    return candidates.cum_log_probs + 0.5 * candidates.depth


# --8<-- [end:own]


# --8<-- [start:settings]
class FirstChoices:
    """Charges every token but its parent's likeliest child, the more the deeper it stands."""

    def __init__(self, price):
        self.price = price

    def __call__(self, candidates):
        return candidates.cum_log_probs - self.price * candidates.depth * (candidates.ranks > 0)


# --8<-- [end:settings]


# --8<-- [start:use]
def decode(scoring):
    """Returns the texts, and tau: the mean number of tokens that a round keeps."""
    decoder = SpeculativeDecoder(target, ParallelDrafter(head, target, BestFirst(scoring)), budget=16)
    results = decoder.generate(prompts, max_new_tokens=160)
    kept = [stats.num_kept for result in results for stats in result.rounds]
    return [result.token_ids for result in results], sum(kept) / len(kept)


plain, _ = decode(cumulative_log_prob)
for name, scoring in {
    "cumulative log-probability": cumulative_log_prob,
    "a price of 0.2 per level": DepthPenalty(0.2),
    "hybrid, entropy weight 0.5": Hybrid(0.5),
    "entropy alone": EntropyGuided(),
    "bold": bold,
    "first choices": FirstChoices(0.1),
}.items():
    texts, tau = decode(scoring)
    print(f"{name:<28} tau {tau:5.2f}   same text: {texts == plain}")
# --8<-- [end:use]
