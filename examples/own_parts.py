"""Question: what does a part of my own look like, for each kind of part?

Command:  python examples/own_parts.py
Run time: under a minute on a CPU
Expected: a mask as a table, one loss, and a table of tau; every decoder writes the text of plain decoding
"""

import json
import math
from pathlib import Path

import torch

from jetflow import BestFirst, GreedyAcceptor, ParallelDrafter, SpeculativeDecoder, Target, TokenTree, load_head, masks

MODELS = Path("models/tiny")


# --8<-- [start:mask]
def first_positions(count):
    """Everybody sees the first `count` positions: attention sinks."""

    def rule(b, h, q_idx, kv_idx):
        return (kv_idx < count) & (kv_idx <= q_idx)

    return rule


streaming = masks.or_masks(first_positions(2), masks.sliding_window(3))
table = masks.dense(streaming, batch=1, num_heads=1, q_len=8, kv_len=8)
# --8<-- [end:mask]


# --8<-- [start:loss]
class Bhattacharyya:
    """Minus the log of the Bhattacharyya coefficient `sum_v sqrt(p(v) q(v))` of the two laws."""

    def __call__(self, draft_logits, target_logits, labels):
        log_probs = draft_logits.float().log_softmax(-1) + target_logits.detach().float().log_softmax(-1)
        return -(0.5 * log_probs).logsumexp(-1).masked_fill(labels == -100, 0.0)


# --8<-- [end:loss]


# --8<-- [start:source]
class BigramSource:
    """Says what follows a token by how often it did; -inf where it never did. `counts` is [V, V]."""

    def __init__(self, counts, max_depth):
        self.max_depth = max_depth
        self.log_probs = (counts / counts.sum(-1, keepdim=True).clamp(min=1)).log()

    def __call__(self, level, frontier):
        log_probs, tokens = self.log_probs[frontier.tokens].topk(8, dim=-1)
        return tokens, log_probs


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
        return self.expander(context.root_tokens, BigramSource(counts, min(6, context.max_depth)), budget)


# --8<-- [end:drafter]


# --8<-- [start:expander]
class SureNodes:
    """The best tree, cut where the draft itself gives a node less than `floor`; nodes stand best first."""

    def __init__(self, floor):
        self.floor = floor
        self.best = BestFirst()

    def __call__(self, root_tokens, source, budget) -> TokenTree:
        tree = self.best(root_tokens, source, budget)
        return tree.first(int((tree.scores >= math.log(self.floor)).sum(dim=1).max()))


# --8<-- [end:expander]


# --8<-- [start:acceptor]
class Without:
    """Follows the target as if one token did not exist; exactly the target's law without that token."""

    def __init__(self, token, acceptor):
        self.token = token
        self.acceptor = acceptor

    def __call__(self, tree, logits, *, generator=None):
        logits = logits.clone()
        logits[..., self.token] = float("-inf")
        return self.acceptor(tree, logits, generator=generator)


# --8<-- [end:acceptor]


# --8<-- [start:budget]
class Cautious:
    """Verifies few nodes while the last rounds accepted little, else all."""

    max_nodes = 32

    def __call__(self, scores, num_accepted):
        recent = num_accepted[-3:]
        return 6 if recent and sum(recent) / len(recent) < 8 else self.max_nodes


# --8<-- [end:budget]

print("who sees the first two positions and the last three:", table[0, 0].int(), sep="\n")
logits = torch.tensor([[0.0, 0.0], [0.0, 9.0]])
print("Bhattacharyya distance:", Bhattacharyya()(logits, logits.flip(0), torch.tensor([1, -100])).tolist())

target = Target.from_pretrained(str(MODELS / "target"), dtype=torch.float32)
head = load_head(MODELS / "head", dtype=torch.float32)
rows = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:8]
prompts = [target.chat_ids(json.loads(row)["prompt"]) for row in rows]
no_plus = Without(target.tokenizer.convert_tokens_to_ids("+"), GreedyAcceptor())
bigrams, jetflow = BigramDrafter(target.vocab_size, BestFirst()), ParallelDrafter(head, target)
decoders = {
    "drafter: bigrams": SpeculativeDecoder(target, bigrams, budget=16),
    "expander: sure nodes only": SpeculativeDecoder(target, ParallelDrafter(head, target, SureNodes(0.05)), budget=32),
    "budget: cautious": SpeculativeDecoder(target, jetflow, budget=Cautious()),
    "acceptor: without '+'": SpeculativeDecoder(target, jetflow, no_plus, budget=16),
}
print("part                          tau   nodes   text of plain decoding")
for name, decoder in decoders.items():
    plain = SpeculativeDecoder(target, jetflow, decoder.acceptor, budget=1).generate(prompts, max_new_tokens=96)
    results = decoder.generate(prompts, max_new_tokens=96)
    rounds = [stats for result in results for stats in result.rounds]
    tau, nodes = (sum(getattr(stats, count) for stats in rounds) / len(rounds) for count in ("num_kept", "num_nodes"))
    equal = sum(result.token_ids == other.token_ids for result, other in zip(results, plain, strict=True))
    print(f"{name:<27}{tau:>6.2f}{nodes:>8.1f}   {equal} of {len(prompts)}")
