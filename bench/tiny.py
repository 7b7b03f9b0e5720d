"""Question: how much faster does the tiny target write with its JetFlow head, and is the text the same?

    python -m bench.tiny [--write-readme]        (make bench-tiny)

Greedy, float32, all held-out prompts of models/tiny; the methods take turns on every prompt in one
process, and the speedup is the median over prompts of the ratio to our own autoregressive decoding. Writes
results/tiny.json and prints the table; with --write-readme the table in README.md is replaced. Unequal texts are an error.
About 2 minutes on 2 CPU cores. Expected: tau above 7 at budget 16 and above 8 at budget 64, and at least 2x at the best.
"""

import argparse
import dataclasses
import json
import platform
import re
import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console

from jetflow.benchmark.compare import compare
from jetflow.demo import heldout_rows, result_table, tiny_decoders

MODELS, RESULTS, README = Path("models/tiny"), Path("results/tiny.json"), Path("README.md")
BUDGETS = [8, 16, 32, 64, 128]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-readme", action="store_true")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    args = parser.parse_args()
    target, decoders = tiny_decoders(MODELS, BUDGETS)
    prompts = [target.chat_ids(row["prompt"]) for row in heldout_rows(MODELS, args.num_prompts)]
    results = compare(decoders, prompts, max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    Console().print(result_table(results))
    report = {
        "command": "python -m bench.tiny",
        "settings": {"num_prompts": len(prompts), "repeats": args.repeats, "max_new_tokens": args.max_new_tokens},
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "results": [dataclasses.asdict(result) for result in results],
    }
    if any(result.texts_equal != result.num_prompts for result in results):
        sys.exit("texts differ from autoregressive decoding; nothing was written")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    if args.write_readme:
        README.write_text(with_table(README.read_text(), report))


def with_table(readme: str, report: dict) -> str:
    """Returns the README with a fresh table between its two markers."""
    rows = ["| method | tau | tokens/s | speedup | texts equal |", "|---|---|---|---|---|"]
    for row in report["results"]:
        rows.append(
            f"| {row['name']} | {row['tau']:.2f} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x "
            f"| {row['texts_equal']} of {row['num_prompts']} |"
        )
    settings, versions = report["settings"], report["versions"]
    rows += [
        "",
        f"{settings['num_prompts']} prompts, {settings['repeats']} repeats, {report['threads']} threads ({report['machine']}), "
        f"torch {versions['torch']}, transformers {versions['transformers']}.",
    ]
    return between_marks(readme, "results", "\n".join(rows))


def between_marks(text: str, name: str, table: str) -> str:
    """Returns `text` with a fresh table between its marks `<!-- NAME -->` and `<!-- /NAME -->`."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
    return marked.sub(rf"\g<1>{table}\n\g<2>", text)


if __name__ == "__main__":
    main()
