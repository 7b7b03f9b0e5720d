"""Question: what does a pairwise correction add to a draft?

    python -m bench.pairwise_source [--target DIR --head DIR] [--rank 64] [--num-prompts 12] [--threads 1]

Decodes the held-out prompts of the tiny pair greedily with trees of 33 nodes by one head without a correction, with a pairwise
and with a gated one. These corrections end in zeros, so that all three draft the same trees, but are computed like any other,
for 32 candidates of each depth. The heads take turns prompt by prompt. Prints the median milliseconds of a round's phases, and
what each kind adds to drafting, pass and building of the tree together, in the median round: in milliseconds and as a share of
the pass and of the round. Writes results/pairwise_source.json for the tiny pair. Half a minute for it.
Expected: a fifth of a pass of the tiny head, 0.3 ms, and a few percent of a pass of SmolLM2's, as most of it is launches.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import torch

from jetflow import ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.demo import heldout_rows
from jetflow.heads.block_draft_head import BlockDraftHead

TINY = Path("models/tiny")
MARGINAL, CORRECTED = "marginal", ("pairwise", "gated")
BUDGET, NEW_TOKENS, REPEATS = 33, 100, 6
PHASES = ("draft", "build", "verify", "accept", "commit")


def decoders(target: Target, folder: str, rank: int) -> dict[str, SpeculativeDecoder]:
    """The same head without and with corrections that add zeros."""
    plain = load_head(folder, dtype=target.dtype)
    weights = {name: weight for name, weight in plain.state_dict().items() if not name.startswith("correction.")}
    found = {}
    for name in (MARGINAL, *CORRECTED):
        correction = None if name == MARGINAL else name
        head = BlockDraftHead(dataclasses.replace(plain.config, correction=correction, correction_rank=rank)).eval()
        head.load_state_dict(weights, strict=False)
        found[name] = SpeculativeDecoder(target, ParallelDrafter(head.to(target.dtype), target, width=32), budget=BUDGET)
    return found


def measure(found: dict[str, SpeculativeDecoder], prompts: list[list[int]]) -> dict[str, list[dict[str, float]]]:
    """Seconds by phase of all rounds, by head; the rounds of all heads are the same ones."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    names = list(found)
    for turn, prompt in enumerate(prompts * REPEATS):
        first, kept = turn % len(names), []
        for name in names[first:] + names[:first]:
            rounds = found[name].generate(prompt, max_new_tokens=NEW_TOKENS).rounds
            kept.append([one.num_kept for one in rounds])
            seconds[name] += [one.seconds for one in rounds]
        assert kept[1:] == kept[:-1], "all heads must draft the same trees"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY / "target"))
    parser.add_argument("--head", default=str(TINY / "head"))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = Target.from_pretrained(args.target, dtype=torch.float32)
    prompts = [target.chat_ids(row["prompt"]) for row in heldout_rows(TINY, args.num_prompts)]
    seconds = measure(decoders(target, args.head, args.rank), prompts)
    medians = {
        name: {phase: 1000 * statistics.median(one[phase] for one in rounds) for phase in PHASES}
        for name, rounds in seconds.items()
    }
    report = {"command": "python -m bench.pairwise_source", "settings": vars(args)}
    for name, phases in medians.items():
        print(f"{name:<10}", *(f"{phase} {value:.3f} ms " for phase, value in phases.items()))
    report["medians_ms"] = {name: {phase: round(value, 3) for phase, value in one.items()} for name, one in medians.items()}
    plain = medians[MARGINAL]
    for name in CORRECTED:
        pairs = zip(seconds[name], seconds[MARGINAL], strict=True)
        added = 1000 * statistics.median(sum(one[phase] - other[phase] for phase in ("draft", "build")) for one, other in pairs)
        shares = {"added_ms": added, "of_a_pass": added / plain["draft"], "of_a_round": added / sum(plain.values())}
        report[name] = {key: round(value, 3) for key, value in shares.items()}
        print(f"{name} adds {added:.3f} ms: {shares['of_a_pass']:.1%} of a pass, {shares['of_a_round']:.1%} of a round")
    if Path(args.target) == TINY / "target":
        Path("results/pairwise_source.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
