"""Trains the tiny pair from nothing: a target of 2.5 million parameters and a JetFlow head that drafts for it.

Question: how many tokens does one target pass commit when a small causal head drafts trees for a small target?
Command:  python examples/train_tiny.py --out models/tiny       (--smoke: every stage in seconds, at toy sizes)
Run time: about 11 minutes on two CPU cores; a stage whose output lies in --work-dir is not run again.
Expected: tau of at least 7 at budget 16 and 8 at budget 64, on prompts that training never saw.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_corpus import documents, make_tokenizer
from tiny_loop import Row, Stages, answers, batches, train, write_pair
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jetflow.acceptors import GreedyAcceptor
from jetflow.chat import chat_ids
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.checkpoint import load_head, save_head
from jetflow.heads.config import DraftHeadConfig
from jetflow.losses import ForwardKL
from jetflow.targets import Target
from jetflow.training import draft_loss

FULL = {"documents": 40000, "vocab": 640, "hidden": 192, "target_steps": 1000, "answers": 4000, "head_steps": 750,
        "heldout": 60, "new_tokens": 160}  # fmt: skip
SMOKE = {"documents": 300, "vocab": 300, "hidden": 64, "target_steps": 6, "answers": 32, "head_steps": 4,
         "heldout": 3, "new_tokens": 20}  # fmt: skip
NUM_LAYERS, TARGET_BATCH = 6, 12
TAPS, BLOCK_SIZE, NUM_ANCHORS, HEAD_BATCH, BUDGETS = (0, 2, 4), 16, 8, 16, (16, 64)


def train_target(sizes: dict[str, int], docs: list[dict[str, str]], seed: int, folder: Path) -> None:
    """Trains tokenizer and target on prompts and answers of the corpus and saves them, weights in bfloat16."""
    texts = [doc["prompt"] + "\n" + doc["answer"] for doc in docs[:8000]]
    tokenizer = make_tokenizer(texts, sizes["vocab"])
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=sizes["hidden"], intermediate_size=512, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    # For sequences this short plain attention is faster on a CPU than SDPA, above all backwards.
    model.set_attn_implementation("eager")
    prompts = [ask(tokenizer, doc["prompt"]) for doc in docs]
    answers = tokenizer([doc["answer"] + tokenizer.eos_token for doc in docs])["input_ids"]
    stream = batches([(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)], TARGET_BATCH, seed)

    def loss_of() -> tuple[Tensor, str]:
        token_ids, loss_mask, _ = next(stream)
        hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][loss_mask[:, 1:]])
        return F.cross_entropy(logits.float(), token_ids[:, 1:][loss_mask[:, 1:]]), ""

    train(model, sizes["target_steps"], lambda done: min(1.0, (1 - done) / 0.6), loss_of)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of a chat that waits for its answer."""
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}])


def regenerate(target: Target, prompts: list[str], max_new_tokens: int) -> list[Row]:
    """The target's own greedy answers: what the head learns to predict."""
    asked = [ask(target.tokenizer, prompt) for prompt in prompts]
    return answers(target, asked, GreedyAcceptor(), max_new_tokens, size=500)


def train_head(target: Target, rows: list[Row], steps: int, seed: int, folder: Path) -> None:
    """Trains the JetFlow head on the target's answers by forward KL and saves it, weights in bfloat16."""
    sizes = {"num_layers": 2, "block_size": BLOCK_SIZE, "mask_token_id": target.tokenizer.mask_token_id, "taps": TAPS}
    head = BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes))
    stream, generator = batches(rows, HEAD_BATCH, seed), torch.Generator().manual_seed(seed)

    def loss_of() -> tuple[Tensor, str]:
        out = draft_loss(head, target, next(stream), loss=ForwardKL(), num_anchors=NUM_ANCHORS, generator=generator)
        return out.loss, f"  expected acceptance length {out.expected_acceptance_length.item():.2f}"

    train(head, steps, lambda done: 0.5 + 0.5 * math.cos(math.pi * done), loss_of)
    save_head(head.to(torch.bfloat16), folder)


def evaluate(target: Target, drafter: ParallelDrafter, heldout: list[dict[str, str]], max_new_tokens: int) -> dict[str, object]:
    """Decodes the held-out prompts in float32 with and without the head."""
    prompts = [ask(target.tokenizer, doc["prompt"]) for doc in heldout]
    plain = SpeculativeDecoder(target, drafter, budget=1).generate(prompts, max_new_tokens=max_new_tokens)
    right = [one.text == doc["answer"] for one, doc in zip(plain, heldout, strict=True)]
    mean_new_tokens = round(sum(len(one.token_ids) for one in plain) / len(plain), 1)
    result: dict[str, object] = {"num_heldout": len(plain), "max_new_tokens": max_new_tokens}
    result |= {"mean_new_tokens": mean_new_tokens, "answers_right": f"{sum(right)}/{len(right)}"}
    for budget in BUDGETS:
        answers = SpeculativeDecoder(target, drafter, budget=budget).generate(prompts, max_new_tokens=max_new_tokens)
        rounds = [stats.num_kept for one in answers for stats in one.rounds]
        result[f"tau_{budget}"] = round(sum(rounds) / len(rounds), 2)
        same = sum(one.token_ids == other.token_ids for one, other in zip(plain, answers, strict=True))
        result[f"same_as_autoregressive_{budget}"] = f"{same}/{len(plain)}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the pair and its card go; out/ in --work-dir when absent")
    parser.add_argument("--work-dir", type=Path, help="finished stages, which are reused; runs/tiny-SEED when absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see that every stage runs")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    sizes = SMOKE if args.smoke else FULL
    work = args.work_dir or Path(f"runs/tiny-{'smoke-' if args.smoke else ''}{args.seed}")
    docs = documents(sizes["documents"], args.seed)
    heldout, docs = docs[: sizes["heldout"]], docs[sizes["heldout"] :]
    stages = Stages(work)
    files = {name: work / name for name in ("target", "answers.pt", "head", "evaluation.json")}
    stages.run("target", files["target"], lambda: train_target(sizes, docs, args.seed, files["target"]))
    target = Target.from_pretrained(str(files["target"]), dtype=torch.float32)
    prompts, limit = [doc["prompt"] for doc in docs[: sizes["answers"]]], sizes["new_tokens"]
    stages.run("answers", files["answers.pt"], lambda: torch.save(regenerate(target, prompts, limit), files["answers.pt"]))
    rows = torch.load(files["answers.pt"])
    stages.run("head", files["head"], lambda: train_head(target, rows, sizes["head_steps"], args.seed, files["head"]))
    drafter = ParallelDrafter(load_head(str(files["head"]), dtype=torch.float32), target)
    measure = partial(evaluate, target, drafter, heldout, limit)
    stages.run("evaluation", files["evaluation.json"], lambda: files["evaluation.json"].write_text(json.dumps(measure())))
    result = {"seed": args.seed, "total_seconds": sum(stages.seconds.values()), "seconds": stages.seconds}
    result |= json.loads(files["evaluation.json"].read_text())
    write_pair(work, args.out or work / "out", heldout, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
