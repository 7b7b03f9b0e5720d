"""Question: what does a pairwise correction add to a draft?

    python -m bench.pairwise_source [--target DIR --head DIR] [--rank 64] [--threads 1]

The same head without and with a gated correction (random weights: a cost does not depend on them), taking turns behind a text
of 120 tokens. Timed are the pass of the head, with its output embedding, and the whole of what comes before the tree: pass,
candidates, and the table of their laws (32 x 32 for each depth). Prints medians in milliseconds and the overhead as a share of
a pass, and writes results/pairwise_source.json for the tiny pair. Ten seconds for it.
Expected: about a fifth of a pass of the tiny head, 0.3 ms, and 2 % of one of SmolLM2's, as most of it is launches.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from jetflow import ParallelDrafter, Target, load_head
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.checkpoint import load_config
from jetflow.protocols import DraftContext

TINY, LENGTH, REPEATS = Path("models/tiny"), 120, 300


def drafters(target: Target, head: str, rank: int) -> dict[str, ParallelDrafter]:
    """The head with and without a correction, behind the same text."""
    plain = load_head(head, dtype=torch.float32)
    weights = {name: weight for name, weight in plain.state_dict().items() if not name.startswith("correction.")}
    ids = torch.arange(LENGTH)[None] % target.vocab_size
    found = {}
    for name, correction in (("marginal", None), ("pairwise", "gated")):
        one = BlockDraftHead(dataclasses.replace(plain.config, correction=correction, correction_rank=rank)).eval()
        one.load_state_dict(weights, strict=False)
        if correction is not None:
            for weight in one.correction.parameters():
                torch.nn.init.normal_(weight, std=0.02)
        found[name] = ParallelDrafter(one, target, width=32)
        found[name].reset(1)
        found[name].observe(ids, target.features(ids, found[name].taps)[0], torch.tensor([LENGTH - 1]))
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY / "target"))
    parser.add_argument("--head", default=str(TINY / "head"))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = Target.from_pretrained(args.target, dtype=torch.float32)
    found, depth = drafters(target, args.head, args.rank), load_config(args.head).depth
    roots = torch.tensor([LENGTH % target.vocab_size])
    context = DraftContext(roots, torch.tensor([LENGTH - 1]), [list(range(LENGTH))], max_depth=depth)
    seconds: dict[str, list[float]] = {}
    for turn in range(REPEATS + 10):
        for name, drafter in found.items() if turn % 2 else reversed(found.items()):
            for what, run in (
                ("pass", lambda one: one.draft_logits(roots, depth)), ("source", lambda one: one._source(context, depth, 33))
            ):  # fmt: skip
                begin = time.perf_counter()
                run(drafter)
                if turn >= 10:
                    seconds.setdefault(f"{name}, {what}", []).append(1000 * (time.perf_counter() - begin))
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    added = [one - other for one, other in zip(seconds["pairwise, source"], seconds["marginal, source"], strict=True)]
    share = statistics.median(added) / medians["marginal, pass"]
    for name, value in medians.items():
        print(f"{name:<18} {value:7.3f} ms")
    print(f"a pairwise source adds {share:.1%} of a pass")
    if Path(args.target) == TINY / "target":
        report = {
            "command": "python -m bench.pairwise_source", "settings": vars(args), "medians_ms": medians, "added_share": share,
        }  # fmt: skip
        Path("results/pairwise_source.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
