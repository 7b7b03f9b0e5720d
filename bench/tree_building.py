"""Question: how long does it take to make a tree of draft logits, and is growing level by level worth it?

    python -m bench.tree_building

One core, depth 15, vocabulary 32,000, budget 256; width 16, and 255, which drafters take when no width is given. Both
sides get the same logits and take turns; a plain heap version (pop the best prefix, push its next sibling and its first
child) stands beside ours. Prints medians and the ratio.
Expected: under 5 ms from the logits to the tree. The heap is quicker for one row on a CPU; ours takes a batch of rows at
once and nothing has to leave the GPU.
"""

import heapq
import json
import statistics
import time
from pathlib import Path

import torch

from jetflow import BestFirst, MarginalSource, TokenTree

DEPTH, VOCAB, BUDGET, WIDTHS, REPEATS = 15, 32_000, 256, (16, 255), 100


def ours(logits: torch.Tensor, width: int) -> TokenTree:
    source = MarginalSource.from_logits(logits, width)
    return BestFirst()(torch.zeros(len(logits), dtype=torch.int64), source, BUDGET)


def with_heap(logits: torch.Tensor, width: int) -> TokenTree:
    """The same tree from a heap on the host: B pops."""
    values, tokens = logits[0].log_softmax(-1).topk(width, dim=-1)
    table, ids = values.tolist(), tokens.tolist()
    nodes, scores = [(0, -1)], [0.0]
    depths = [0]
    heap = [(-table[0][0], 1, 0, 0)]
    while heap and len(nodes) < BUDGET:
        negative, depth, parent, rank = heapq.heappop(heap)
        nodes.append((ids[depth - 1][rank], parent))
        scores.append(-negative)
        depths.append(depth)
        if rank + 1 < width:
            heapq.heappush(heap, (-(scores[parent] + table[depth - 1][rank + 1]), depth, parent, rank + 1))
        if depth < DEPTH:
            heapq.heappush(heap, (negative - table[depth][0], depth + 1, len(nodes) - 1, 0))
    return TokenTree(
        torch.tensor([[token for token, _ in nodes]]),
        torch.tensor([[parent for _, parent in nodes]]),
        torch.tensor([depths]),
        torch.tensor([scores]),
        torch.tensor([len(nodes)]),
    )


def measure(logits: list[torch.Tensor], width: int) -> dict[str, float]:
    """Returns median milliseconds of both sides and the median ratio."""
    gap = max(abs(float(ours(x, width).scores.exp().sum() - with_heap(x, width).scores.exp().sum())) for x in logits)
    assert gap < 1e-3, gap
    seconds: dict[str, list[float]] = {"level by level": [], "heap": []}
    for index in range(REPEATS):
        turns = [("level by level", ours), ("heap", with_heap)]
        for name, build in turns if index % 2 else turns[::-1]:
            begin = time.perf_counter()
            build(logits[index % len(logits)], width)
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    ratio = statistics.median(h / o for h, o in zip(seconds["heap"], seconds["level by level"], strict=True))
    return {**medians, "heap / level by level": ratio}


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(1, DEPTH, VOCAB, generator=generator) for _ in range(8)]
    rows = {width: measure(logits, width) for width in WIDTHS}
    for width, row in rows.items():
        for name in ("level by level", "heap"):
            print(f"width {width:<4}{name:<16}{row[name]:7.2f} ms")
        print(f"width {width:<4}heap / level by level, median ratio: {row['heap / level by level']:.2f}")
    report = {
        "command": "python -m bench.tree_building",
        "settings": {"depth": DEPTH, "vocab": VOCAB, "budget": BUDGET, "threads": 1, "repeats": REPEATS},
        "medians_by_width": rows,
    }
    Path("results").mkdir(exist_ok=True)
    Path("results/tree_building.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
