"""Question: do trees keep what their scores promise, and does what the last tree held below the bonus help the next one?

    python -m bench.tree_reuse [--head models/tiny/head] [--passes 1 2 3] [--num-prompts 12]

Greedy, float32, held-out prompts of models/tiny. For every method: measured tau, the tau that the trees' scores expected
(the sum of their nodes' probabilities), the share of rounds whose tree had a seed from the round before, and seconds per
round of the drafting side. More than one pass needs a head with refinement. Texts of all methods must be equal.
About 2 minutes on 2 CPU cores. Writes results/tree_reuse.json.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from jetflow import ParallelDrafter, ReusingDrafter, SpeculativeDecoder, Target, load_head
from jetflow.demo import heldout_rows
from jetflow.drafters.reuse import seed_trees
from jetflow.protocols import DraftContext

MODELS, RESULTS = Path("models/tiny"), Path("results/tree_reuse.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=MODELS / "head")
    parser.add_argument("--passes", type=int, nargs="+", default=[1])
    parser.add_argument("--weights", type=float, nargs="*", default=[0.05, 0.2])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    target = Target.from_pretrained(str(MODELS / "target"), dtype=torch.float32)
    head = load_head(str(args.head), dtype=torch.float32)
    prompts = [target.chat_ids(row["prompt"]) for row in heldout_rows(MODELS, args.num_prompts)]
    drafters = {f"passes={passes}": ParallelDrafter(head, target, passes=passes) for passes in args.passes}
    for weight in args.weights:
        drafters[f"reuse, weight {weight}"] = ReusingDrafter(ParallelDrafter(head, target), weight)
    rows, texts = [], []
    for budget in args.budgets:
        for name, drafter in drafters.items():
            row, text = measure(SpeculativeDecoder(target, drafter, budget=budget), prompts, args.max_new_tokens)
            rows.append({"method": name, "budget": budget, **row})
            texts.append(text)
    assert all(text == texts[0] for text in texts), "texts differ"
    report = {"num_prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "results": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("method", "budget", "tau", "expected tau", "rounds with a seed", "draft ms per round")
    for row in rows:
        seeded = f"{row['seeded']:.0%}" if row["method"].startswith("reuse") else ""
        numbers = f"{row['tau']:.2f}", f"{row['expected_tau']:.2f}", seeded, f"{row['draft_ms']:.1f}"
        table.add_row(row["method"], str(row["budget"]), *numbers)
    Console().print(table)


def measure(decoder: SpeculativeDecoder, prompts: list[list[int]], limit: int) -> tuple[dict[str, float], list[list[int]]]:
    """Means over all rounds, and the texts."""
    rounds, texts, seeded = [], [], 0
    for prompt in prompts:
        own: list = []
        texts.append(decoder.generate(prompt, max_new_tokens=limit, on_round=own.append).token_ids)
        for before, after in pairwise(own):
            seeded += had_seed(before, after)
        rounds += own
    count = len(rounds)
    drafting = sum(one.stats.seconds.get(phase, 0.0) for one in rounds for phase in ("draft", "build"))
    means = {
        "tau": sum(len(one.kept) for one in rounds) / count,
        "expected_tau": sum(one.expected_kept for one in rounds) / count,
        "seeded": seeded / count,
        "draft_ms": 1000 * drafting / count,
        "num_rounds": count,
    }
    return means, texts


def had_seed(before, after) -> bool:
    """Whether the tree before held something below the root of the one after."""
    context = DraftContext(after.tree.tokens[:, 0], torch.zeros(1, dtype=torch.int64), [[]], max_depth=99)
    return int(seed_trees(before.tree, context, [len(before.kept)]).num_nodes[0]) > 1


if __name__ == "__main__":
    main()
