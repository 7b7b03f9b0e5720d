"""Question: what are the parts of a speculative decoder, and how do they go together?

Command:  python examples/quickstart.py
Run time: a few seconds on a CPU
Expected: one answer, the same one that plain decoding gives, in several times fewer target passes; then a sampled one
"""

# --8<-- [start:compose]
import torch

from jetflow import BestFirst, GreedyAcceptor, ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.scoring import cumulative_log_prob

# The frozen model whose text we want, and the small head that drafts for it.
target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
head = load_head("models/tiny/head", dtype=torch.float32)

# One pass of the head gives a law (the probabilities of a token) for each depth below the last token;
# the expander makes the tree of the likeliest paths of them.
expander = BestFirst(scoring=cumulative_log_prob)
drafter = ParallelDrafter(head, target, expander)

# The target checks all 16 nodes in one pass; the acceptor follows its own choice through the tree.
decoder = SpeculativeDecoder(target, drafter, GreedyAcceptor(), budget=16)
question = "Tina has 3 eggs and Jack has 6 times as many. How many eggs do they have together?"
prompt = target.chat_ids(question)
result = decoder.generate(prompt, max_new_tokens=160)
print(result.text)
print(f"{len(result.token_ids)} tokens in {len(result.rounds)} rounds: tau {result.tau:.2f}")
# --8<-- [end:compose]

# --8<-- [start:plain]
# With a budget of one node nothing is drafted: the same code is plain decoding, one token per pass.
plain = SpeculativeDecoder(target, drafter, budget=1).generate(prompt, max_new_tokens=160)
assert plain.token_ids == result.token_ids
print(f"the same text as plain decoding, which took {len(plain.rounds)} passes")
# --8<-- [end:plain]

# --8<-- [start:sampling]
from jetflow import SamplingAcceptor

acceptor = SamplingAcceptor(temperature=0.8, top_p=0.95)
sampled = SpeculativeDecoder(target, drafter, acceptor, budget=16)
print(sampled.generate(prompt, max_new_tokens=160, seed=0).text)
# --8<-- [end:sampling]
