"""Question: what happens in one round, step by step?

Command:  python examples/record_round.py docs/assets/round.json
Run time: a few seconds on a CPU
Expected: the file behind the docs' page "One round": the tree of one round of the tiny pair, and the path that the target took
"""

import json
import sys
from pathlib import Path

import torch

from jetflow import ParallelDrafter, SpeculativeDecoder, Target, load_head

PROMPT, BUDGET = "Emma drives 3 hours and makes 6 miles in each hour. Then Emma walks 4 miles. How far does Emma go?", 64

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
decoder = SpeculativeDecoder(target, ParallelDrafter(head, target), budget=BUDGET)
rounds = []
result = decoder.generate(target.chat_ids(PROMPT), max_new_tokens=120, on_round=rounds.append)

# A round that is neither perfect nor hopeless shows most.
number = min(range(len(rounds) - 1), key=lambda i: abs(rounds[i].num_accepted - 6))
shown = rounds[number]
written = sum(len(one.kept) for one in rounds[:number]) + 1
tree, decode = shown.tree, target.tokenizer.decode
scores = tree.scores[0].tolist()
nodes = [
    {
        "text": decode([token]),
        "parent": parent,
        "depth": depth,
        "probability": round(torch.tensor(score - (scores[parent] if parent >= 0 else 0.0)).exp().item(), 4),
        "path": round(torch.tensor(score).exp().item(), 4),
    }
    for token, parent, depth, score in zip(
        tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.depths[0].tolist(), scores, strict=True
    )
]
record = {
    "prompt": PROMPT,
    "before": decode(result.token_ids[:written], skip_special_tokens=True),
    "nodes": nodes,
    "accepted": shown.acceptance.path[0, 1 : shown.num_accepted + 1].tolist(),
    "bonus": decode([shown.kept[-1]]),
}
out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
if out:
    out.write_text(json.dumps(record, indent=1) + "\n")
print(f"round {number}: {len(nodes)} nodes, {shown.num_accepted} accepted, then {record['bonus']!r}")
