"""Question: how is a head trained, and what does a loss of my own look like?

Command:  python examples/tutorials/losses.py
Run time: under a minute on a CPU
Expected: the own loss is 0 for equal laws and has the right gradient; sixty steps with it teach a new head something
"""

# --8<-- [start:ready]
import torch

from jetflow import CrossEntropy, ForwardKL, ReverseKL, TotalVariation

draft = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).log()
teacher = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
labels = torch.tensor([0, 0])
for loss in (CrossEntropy(), ForwardKL(), ReverseKL(), TotalVariation()):
    values = loss(draft, teacher, labels)
    print(f"{type(loss).__name__:<16}{values[0]:7.3f}{values[1]:7.3f}")
# --8<-- [end:ready]


# --8<-- [start:own]
class Bhattacharyya:
    """Minus the log of the Bhattacharyya coefficient `sum_v sqrt(p(v) q(v))` of the two laws."""

    def __call__(self, draft_logits, target_logits, labels):
        draft = draft_logits.float().log_softmax(-1)
        target = target_logits.detach().float().log_softmax(-1)
        return -(0.5 * (draft + target)).logsumexp(-1).masked_fill(labels == -100, 0.0)


# --8<-- [end:own]

# --8<-- [start:check]
from functools import partial

loss = Bhattacharyya()
assert loss(teacher, teacher, labels).abs().max() < 1e-6, "equal laws have no distance"
assert loss(draft, teacher, torch.tensor([0, -100]))[1] == 0, "an ignored label counts nothing"
logits = draft.double().requires_grad_()
of_draft = partial(loss, target_logits=teacher, labels=labels)
assert torch.autograd.gradcheck(of_draft, logits, eps=1e-3, atol=1e-3)
values = loss(draft, teacher, labels)
print(f"{type(loss).__name__:<16}{values[0]:7.3f}{values[1]:7.3f}")
# --8<-- [end:check]

# --8<-- [start:batch]
import json

from torch.nn.utils.rnn import pad_sequence

from jetflow import BlockDraftHead, DraftHeadConfig, PromptLookupDrafter, SpeculativeDecoder, Target
from jetflow.training import Batch, draft_loss

target = Target.from_pretrained("models/tiny/target", dtype=torch.float32)
with open("models/tiny/heldout.jsonl") as file:
    prompts = [target.chat_ids(json.loads(line)["prompt"]) for line in list(file)[:4]]

# The head learns from what its target writes.
answers = SpeculativeDecoder(target, PromptLookupDrafter()).generate(prompts, max_new_tokens=64)
pairs = list(zip(prompts, answers, strict=True))
rows = [torch.tensor(prompt + answer.token_ids) for prompt, answer in pairs]
learned = [torch.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
batch = Batch(pad_sequence(rows, batch_first=True), pad_sequence(learned, batch_first=True))
# --8<-- [end:batch]

# --8<-- [start:train]
torch.manual_seed(0)
mask = target.tokenizer.mask_token_id
config = DraftHeadConfig.for_target(
    target.config,
    num_layers=1,
    block_size=8,
    mask_token_id=mask,
    taps=(1, 3, 5),
)
head = BlockDraftHead(config)
optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(0)
for step in range(61):
    out = draft_loss(head, target, batch, loss=Bhattacharyya(), num_anchors=8, generator=generator)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        accuracy = out.accuracy_by_depth[0].item()
        print(f"step {step:2d}   loss {out.loss.item():5.2f}   accuracy at depth 1 {accuracy:4.2f}")
# --8<-- [end:train]
