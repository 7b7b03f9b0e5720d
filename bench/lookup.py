"""Question: is prompt lookup with jetflow the target's own text, and how fast is it beside Hugging Face's?

    python -m bench.lookup --target DIR --prompts FILE.jsonl [FILE.jsonl ...] --out results/NAME.json

Float32 pass: token ids of jetflow (prompt lookup trees) against Hugging Face `generate` (greedy, explicit mask) on every
prompt; any difference is an error. Speed pass (bfloat16): four methods take turns on each prompt in one process; the
table shows total tokens per second and the median over prompts of the ratio to plain Hugging Face decoding. In bfloat16
passes of different width may differ in their last bits, so texts are compared but not required to be equal.
About 15 minutes for SmolLM2-135M on 2 CPU cores. Expected: equal ids, and both lookups faster than plain decoding.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from jetflow import PromptLookupDrafter, SpeculativeDecoder, Target

HF_LOOKUP_TOKENS = 10


def read_prompts(files: list[str], per_file: int, target: Target) -> list[list[int]]:
    """First `per_file` first turns of each file, through the chat template."""
    prompts = []
    for file in files:
        for line in Path(file).read_text().splitlines()[:per_file]:
            messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompts.append(target.tokenizer(text, add_special_tokens=False).input_ids)
    return prompts


def methods(target: Target, budget: int, num_new: int) -> dict[str, Callable[[list[int]], tuple[list[int], float]]]:
    """Each method takes a prompt and returns the new ids and tau (tokens per target pass)."""

    def hugging_face(**extra: int) -> Callable[[list[int]], tuple[list[int], float]]:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = target.model.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, **extra)
            return out[0, len(prompt) :].tolist(), float("nan")

        return run

    def jetflow(nodes: int) -> Callable[[list[int]], tuple[list[int], float]]:
        decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=nodes)

        def run(prompt: list[int]) -> tuple[list[int], float]:
            result = decoder.generate(prompt, max_new_tokens=num_new)
            return result.token_ids, result.tau or 1.0

        return run

    return {
        "Hugging Face plain": hugging_face(),
        "Hugging Face prompt lookup": hugging_face(prompt_lookup_num_tokens=HF_LOOKUP_TOKENS),
        "jetflow plain": jetflow(1),
        "jetflow prompt lookup": jetflow(budget),
    }


def check_ids(target: Target, prompts: list[list[int]], budget: int, num_new: int) -> int:
    """Returns how many prompts got equal ids from jetflow's lookup and from plain Hugging Face decoding."""
    runs = methods(target, budget, num_new)
    equal = 0
    for index, prompt in enumerate(prompts):
        ours, tau = runs["jetflow prompt lookup"](prompt)
        theirs, _ = runs["Hugging Face plain"](prompt)
        equal += ours == theirs
        print(f"float32 prompt {index}: equal={ours == theirs} tokens={len(ours)} tau={tau:.2f}", flush=True)
    return equal


def measure(target: Target, prompts: list[list[int]], budget: int, num_new: int) -> dict[str, dict]:
    """All methods take turns on each prompt; the order turns by one from prompt to prompt."""
    runs = methods(target, budget, num_new)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    texts: dict[str, list[list[int]]] = {name: [] for name in names}
    taus: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        runs[name](prompts[0][:32])
    for index, prompt in enumerate(prompts):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            begin = time.perf_counter()
            ids, tau = runs[name](prompt)
            seconds[name].append(time.perf_counter() - begin)
            texts[name].append(ids)
            taus[name].append(tau)
    plain = [len(ids) / s for ids, s in zip(texts[names[0]], seconds[names[0]], strict=True)]
    table = {}
    for name in names:
        rates = [len(ids) / s for ids, s in zip(texts[name], seconds[name], strict=True)]
        table[name] = {
            "tokens_per_second": sum(map(len, texts[name])) / sum(seconds[name]),
            "median_ratio_to_plain": statistics.median(a / b for a, b in zip(rates, plain, strict=True)),
            "mean_tau": statistics.fmean(taus[name]) if "jetflow" in name else None,
            "texts_equal_to_plain": sum(a == b for a, b in zip(texts[name], texts[names[0]], strict=True)),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--per-file", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    target = Target.from_pretrained(args.target, dtype=torch.float32)
    prompts = read_prompts(args.prompts, args.per_file, target)[: args.num_prompts]
    equal = check_ids(target, prompts, args.budget, args.max_new_tokens)
    target = Target.from_pretrained(args.target, dtype=torch.bfloat16)
    speed = measure(target, prompts, args.budget, args.max_new_tokens)
    report = {
        "settings": {**vars(args), "target": Path(args.target).name, "prompts": [Path(f).name for f in args.prompts]},
        "num_prompts": len(prompts),
        "float32_ids_equal": equal,
        "bfloat16": speed,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    table = Table("method", "tokens/s", "ratio to plain", "tau", "texts equal", title="bfloat16")
    for name, row in speed.items():
        tau = "" if row["mean_tau"] is None else f"{row['mean_tau']:.2f}"
        ratio = f"{row['median_ratio_to_plain']:.2f}"
        table.add_row(name, f"{row['tokens_per_second']:.1f}", ratio, tau, str(row["texts_equal_to_plain"]))
    Console().print(table)
    print(f"float32: {equal} of {len(prompts)} texts equal")
    if equal != len(prompts):
        sys.exit("float32 texts differ from plain decoding")


if __name__ == "__main__":
    main()
