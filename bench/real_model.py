"""Question: on a real model, is the text the target's own, and how fast is each way of writing it?

    python -m bench.real_model --target DIR --prompts FILE.jsonl ... [--head DIR] --out results/NAME.json

Exactness (float32): token ids of jetflow (prompt lookup, and the head where one is given) against Hugging Face `generate`
(greedy, explicit mask) on `--exact` prompts of each file; any difference is an error. Speed (bfloat16): all methods take
turns on each prompt in one process; rates are total tokens over total seconds, ratios are medians over prompts of the ratio
to jetflow's own autoregressive path. In bfloat16 passes of different width may differ in their last bits, so texts are
compared but need not be equal. About an hour for SmolLM2-135M, seven files of five prompts and a head, on 2 CPU cores.
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

from jetflow import ParallelDrafter, PromptLookupDrafter, SpeculativeDecoder, Target, load_head
from jetflow.heads.checkpoint import load_frequent_tokens

HF_LOOKUP_TOKENS, LOOKUP_BUDGET = 10, 16
PLAIN = "jetflow autoregressive"
# Takes a prompt, returns the new ids and how many target passes after the prompt's they took (0 where it is not known).
Method = Callable[[list[int]], tuple[list[int], int]]


def read_prompts(file: str, skip: int, count: int, target: Target) -> list[list[int]]:
    """First turns of lines `skip` to `skip + count` of a file, through the chat template."""
    # Not splitlines: it also breaks at separators that may stand inside a JSON string.
    lines = [line for line in Path(file).read_text(encoding="utf-8").split("\n") if line.strip()]
    return [target.chat_ids(json.loads(line)["turns"][0]) for line in lines[skip : skip + count]]


def methods(target: Target, args: argparse.Namespace, *, peers: bool) -> dict[str, Method]:
    """All ways of writing; Hugging Face's prompt lookup and every budget of the head only where `peers` is set."""

    def hugging_face(**extra: int) -> Method:
        def run(prompt: list[int]) -> tuple[list[int], int]:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = target.model.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False, **extra)
            return out[0, len(prompt) :].tolist(), 0

        return run

    def jetflow(drafter: object, nodes: int) -> Method:
        decoder = SpeculativeDecoder(target, drafter, budget=nodes)

        def run(prompt: list[int]) -> tuple[list[int], int]:
            result = decoder.generate(prompt, max_new_tokens=args.max_new_tokens)
            return result.token_ids, len(result.rounds)

        return run

    found = {PLAIN: jetflow(PromptLookupDrafter(), 1), "Hugging Face": hugging_face()}
    if peers:
        found["Hugging Face prompt lookup"] = hugging_face(prompt_lookup_num_tokens=HF_LOOKUP_TOKENS)
    found["jetflow prompt lookup"] = jetflow(PromptLookupDrafter(), LOOKUP_BUDGET)
    if args.head:
        vocabulary = load_frequent_tokens(args.head, args.frequent_tokens) if args.frequent_tokens else None
        drafter = ParallelDrafter(load_head(args.head, dtype=target.dtype), target, vocabulary=vocabulary)
        for budget in args.budgets if peers else args.budgets[-1:]:
            found[f"jetflow head, budget {budget}"] = jetflow(drafter, budget)
    return found


def check_ids(target: Target, prompts: dict[str, list[list[int]]], args: argparse.Namespace) -> dict[str, str]:
    """For each jetflow method how many prompts got the ids of plain Hugging Face decoding."""
    runs = methods(target, args, peers=False)
    chosen = [prompt for part in prompts.values() for prompt in part[: args.exact]]
    expected = [runs["Hugging Face"](prompt)[0] for prompt in chosen]
    equal = {}
    for name in runs:
        if name != "Hugging Face":
            same = sum(runs[name](prompt)[0] == ids for prompt, ids in zip(chosen, expected, strict=True))
            equal[name] = f"{same}/{len(chosen)}"
            print(f"float32, {name}: {equal[name]} texts equal to Hugging Face's", flush=True)
    return equal


def measure(target: Target, prompts: dict[str, list[list[int]]], args: argparse.Namespace) -> dict[str, dict[str, dict]]:
    """For each file and method: rate, ratio, tau, equal texts. The order turns by one from prompt to prompt."""
    runs = methods(target, args, peers=True)
    names = list(runs)
    for name in names:
        runs[name](next(iter(prompts.values()))[0][:32])
    table: dict[str, dict[str, dict]] = {}
    for file, part in prompts.items():
        seconds: dict[str, list[float]] = {name: [] for name in names}
        written: dict[str, list[tuple[list[int], int]]] = {name: [] for name in names}
        for index, prompt in enumerate(part):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                begin = time.perf_counter()
                written[name].append(runs[name](prompt))
                seconds[name].append(time.perf_counter() - begin)
        table[file] = {name: summary(written[name], seconds[name], written[PLAIN], seconds[PLAIN]) for name in names}
        line = ", ".join(f"{name} {row['ratio']:.2f}" for name, row in table[file].items())
        print(f"{file}: {line}", flush=True)
    return table


def summary(written: list, seconds: list[float], plain: list, plain_seconds: list[float]) -> dict:
    """One cell of the table."""
    counts, plain_counts = [len(ids) for ids, _ in written], [len(ids) for ids, _ in plain]
    rates = [count / second for count, second in zip(counts, seconds, strict=True)]
    plain_rates = [count / second for count, second in zip(plain_counts, plain_seconds, strict=True)]
    # The first token comes from the prompt's own pass.
    passes, kept = sum(rounds for _, rounds in written), sum(counts) - len(counts)
    return {
        "tokens_per_second": round(sum(counts) / sum(seconds), 2),
        "ratio": round(statistics.median(a / b for a, b in zip(rates, plain_rates, strict=True)), 3),
        "tau": round(kept / passes, 3) if passes else None,
        "texts_equal": f"{sum(a == b for (a, _), (b, _) in zip(written, plain, strict=True))}/{len(written)}",
        "tokens": sum(counts),
    }


def mean_tau(speed: dict[str, dict[str, dict]]) -> dict[str, float]:
    """Mean over files of each method's tau, where it is known."""
    names = [name for name, row in next(iter(speed.values())).items() if row["tau"] is not None]
    return {name: round(statistics.fmean(rows[name]["tau"] for rows in speed.values()), 2) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head")
    parser.add_argument("--frequent-tokens", type=int, help="draft only so many tokens, the head's most frequent ones")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument(
        "--skip", type=int, default=0, help="lines of each file to leave out, such as those a head was tuned on"
    )
    parser.add_argument("--per-file", type=int, default=5)
    parser.add_argument("--exact", type=int, default=3, help="prompts of each file for the exactness pass")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    target = Target.from_pretrained(args.target, dtype=torch.float32)
    prompts = {Path(file).stem: read_prompts(file, args.skip, args.per_file, target) for file in args.prompts}
    equal = check_ids(target, prompts, args) if args.exact else {}
    target = Target.from_pretrained(args.target, dtype=torch.bfloat16)
    speed = measure(target, prompts, args)
    settings = {**vars(args), "target": Path(args.target).name, "prompts": list(prompts)}
    settings["head"] = Path(args.head).name if args.head else None
    report = {
        "settings": settings,
        "float32_texts_equal": equal,
        "bfloat16": speed,
        "mean_tau": mean_tau(speed),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    names = list(next(iter(speed.values())))
    table = Table("method", *speed, title="bfloat16: ratio to jetflow autoregressive (tau)")
    for name in names:
        cells = [
            f"{row[name]['ratio']:.2f}" + (f" ({row[name]['tau']:.2f})" if row[name]["tau"] else "") for row in speed.values()
        ]
        table.add_row(name, *cells)
    Console(width=160).print(table)
    if any(len(set(one.split("/"))) > 1 for one in equal.values()):
        sys.exit("float32 texts differ from plain decoding")


if __name__ == "__main__":
    main()
