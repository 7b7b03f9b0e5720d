"""Question: where do drafts come from, and how do I draft from laws of my own?

Command:  python examples/tutorials/drafters.py
Run time: under a minute on a CPU
Expected: a tree of bigrams, drawn; then a table of drafters: another tau, the same text
"""

# --8<-- [start:setup]
import json

import torch
from rich.console import Console

from jetflow import (
    BestFirst,
    MergedDrafter,
    ParallelDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    Target,
    load_head,
)
from jetflow.trees.drawing import draw_tree

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]
# --8<-- [end:setup]


# --8<-- [start:source]
class BigramSource:
    """Says what follows a token by how often it did; -inf where it never did. `counts` is [V, V]."""

    def __init__(self, counts, max_depth):
        self.max_depth = max_depth
        self.log_probs = (counts / counts.sum(-1, keepdim=True).clamp(min=1)).log()

    def __call__(self, level, frontier):
        log_probs, tokens = self.log_probs[frontier.tokens].topk(min(8, len(self.log_probs)), dim=-1)
        return tokens, log_probs


# Token 0 is followed by 1 three times and by 2 once, and so on.
counts = torch.tensor([[0, 3, 1], [2, 0, 2], [1, 0, 0]]).float()
tree = BestFirst()(torch.tensor([0]), BigramSource(counts, max_depth=3), budget=7)
Console(width=80).print(draw_tree(tree))
# --8<-- [end:source]


# --8<-- [start:drafter]
class BigramDrafter:
    """Counts the pairs of the text so far and drafts the likeliest continuations."""

    def __init__(self, vocab_size, expander):
        self.vocab_size = vocab_size
        self.expander = expander

    def propose(self, context, budget):
        counts = torch.zeros(self.vocab_size, self.vocab_size)
        text = torch.tensor(context.token_ids[0])
        counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
        source = BigramSource(counts, max_depth=min(6, context.max_depth))
        return self.expander(context.root_tokens, source, budget)


# --8<-- [end:drafter]

# --8<-- [start:use]
bigrams, jetflow = BigramDrafter(target.vocab_size, BestFirst()), ParallelDrafter(head, target)
plain = SpeculativeDecoder(target, jetflow, budget=1).generate(prompts, max_new_tokens=96)
for name, drafter in {
    "prompt lookup": PromptLookupDrafter(),
    "bigrams": bigrams,
    "head": jetflow,
    "head and bigrams": MergedDrafter([jetflow, bigrams], [0.9, 0.1]),
}.items():
    results = SpeculativeDecoder(target, drafter, budget=16).generate(prompts, max_new_tokens=96)
    kept = [stats.num_kept for result in results for stats in result.rounds]
    same = [result.token_ids for result in results] == [result.token_ids for result in plain]
    print(f"{name:<18} tau {sum(kept) / len(kept):5.2f}   same text: {same}")
# --8<-- [end:use]
