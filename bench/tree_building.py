"""Question: how long does it take to make a tree of known laws, level by level and from a heap, and where is which quicker?

    python -m bench.tree_building

One core, depth 15, 32 candidates of a depth, laws of the depth alone and of the token before. Both sides get the same laws
and take turns; the trees are compared. Prints medians and median ratios, and writes results/tree_building.json.
Expected: the heap is several times quicker for a row of few nodes; growth takes a batch at once, and on a GPU nothing has to
leave it. `jetflow.trees.heap.MOST_NODES` is where they meet.
"""

import json
import statistics
import time
from pathlib import Path

import torch

from jetflow import MarginalSource, PairwiseSource, TokenTree
from jetflow.scoring import cumulative_log_prob
from jetflow.trees.growth import grow_best
from jetflow.trees.heap import best_from_heap

DEPTH, WIDTH, VOCAB, REPEATS = 15, 32, 640, 60
CASES = [(1, 16), (1, 64), (1, 256), (4, 64), (8, 64), (16, 64), (4, 256)]


def grown(roots: torch.Tensor, source, budget: int) -> TokenTree:
    return grow_best(roots, source, cumulative_log_prob, levels=min(DEPTH, budget - 1), budget=budget)


def popped(roots: torch.Tensor, source, budget: int) -> TokenTree:
    return best_from_heap(roots, *source.laws(min(DEPTH, budget - 1)), budget)


def sources(rows: int) -> dict:
    """Laws as sharp as those of a head: the likeliest of 32 tokens has about half of the probability."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, DEPTH, VOCAB, generator=generator)
    added = torch.randn(rows, DEPTH - 1, WIDTH, WIDTH, generator=generator)
    pairwise = PairwiseSource.from_logits(logits, WIDTH, lambda parents, children: added)
    return {"marginal": MarginalSource.from_logits(logits, WIDTH), "pairwise": pairwise}


def measure(source, rows: int, budget: int) -> dict[str, float]:
    """Median milliseconds of both sides and the median ratio."""
    roots = torch.zeros(rows, dtype=torch.int64)
    assert torch.equal(grown(roots, source, budget).tokens, popped(roots, source, budget).tokens)
    turns = [("level by level", grown), ("heap", popped)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in turns}
    for index in range(REPEATS):
        for name, build in turns if index % 2 else turns[::-1]:
            begin = time.perf_counter()
            build(roots, source, budget)
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: round(1000 * statistics.median(values), 3) for name, values in seconds.items()}
    ratio = statistics.median(one / other for one, other in zip(seconds["level by level"], seconds["heap"], strict=True))
    return {**medians, "level by level / heap": round(ratio, 2)}


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for rows, budget in CASES:
        for kind, source in sources(rows).items():
            row = {"laws": kind, "rows": rows, "budget": budget, **measure(source, rows, budget)}
            found.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    report = {
        "command": "python -m bench.tree_building",
        "settings": {"depth": DEPTH, "width": WIDTH, "vocab": VOCAB, "threads": 1, "repeats": REPEATS},
        "medians_ms": found,
    }
    Path("results").mkdir(exist_ok=True)
    Path("results/tree_building.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
