"""Question: who decides which drafted tokens stay, and how do I change what the target is taken to want?

Command:  python examples/tutorials/acceptors.py
Run time: under a minute on a CPU
Expected: every row writes what plain decoding with the same acceptor writes; two runs with one seed write the same text
"""

# --8<-- [start:setup]
import json

import torch

from jetflow import (
    GreedyAcceptor,
    ParallelDrafter,
    SamplingAcceptor,
    SpeculativeDecoder,
    Target,
    load_head,
)

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]
# --8<-- [end:setup]

# --8<-- [start:sampling]
drafter = ParallelDrafter(head, target)
acceptor = SamplingAcceptor(temperature=0.8, top_p=0.95)
decoder = SpeculativeDecoder(target, drafter, acceptor, budget=16)
results = [decoder.generate(prompts[1], max_new_tokens=96, seed=seed) for seed in (1, 1, 2)]
first, second, other = (result.text for result in results)
print("one seed, one text:", first == second, "  another seed, another text:", first != other)
# --8<-- [end:sampling]

# --8<-- [start:drawn]
from jetflow import AcceptanceTable, BestFirst, ChildSampling, TraversalVerification

drawn = ParallelDrafter(head, target, BestFirst(AcceptanceTable()), sampling=ChildSampling())
decoder = SpeculativeDecoder(target, drawn, TraversalVerification(temperature=1.0), budget=32)
result = decoder.generate(prompts[1], max_new_tokens=96, seed=0)
print(f"drawn trees, traversal: tau {result.tau:5.2f}")
# --8<-- [end:drawn]


# --8<-- [start:own]
class Without:
    """Follows the target as if one token did not exist: its law without that token, exactly."""

    def __init__(self, token, acceptor):
        self.token = token
        self.acceptor = acceptor

    def __call__(self, tree, logits, *, generator=None):
        logits = logits.clone()
        logits[..., self.token] = float("-inf")
        return self.acceptor(tree, logits, generator=generator)


# --8<-- [end:own]

# --8<-- [start:use]
plus = target.tokenizer.convert_tokens_to_ids("Ġ+")
greedy = GreedyAcceptor()
for name, acceptor in {"greedy": greedy, "greedy, without ' +'": Without(plus, greedy)}.items():
    decoders = [SpeculativeDecoder(target, drafter, acceptor, budget=budget) for budget in (1, 16)]
    plain, results = (decoder.generate(prompts, max_new_tokens=96) for decoder in decoders)
    kept = [stats.num_kept for result in results for stats in result.rounds]
    same = [result.token_ids for result in results] == [result.token_ids for result in plain]
    used = any(plus in result.token_ids for result in results)
    tau = sum(kept) / len(kept)
    print(f"{name:<22} tau {tau:5.2f}   same text as plain: {same}   writes ' +': {used}")
# --8<-- [end:use]
