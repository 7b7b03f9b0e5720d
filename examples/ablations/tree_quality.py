"""Question: does the target believe in the branches that the draft believes in most?

Command:  python examples/ablations/tree_quality.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 5 minutes on two CPU cores with twelve heads to train; heads that exist are not trained again.
Expected: gaps of a few nats with a long tail, smaller where tau is larger. The paper (Table 9, Qwen3-8B, 50 prompts): median
gap 12.4 nats for causal and 62.8 for bidirectional blocks without decay, 27.9 and 32.7 with decay 7.

At roots along the target's own texts the draft's likeliest path of a whole block is scored by both models; the gap is the
draft's log-probability of the path minus the target's. A gap of 20 nats means a branch that the target would never write.
"""

import statistics
from collections.abc import Iterator
from itertools import pairwise

import torch
from lab import HeadSpec, Lab
from options import arguments, make_lab
from report import print_table, write

from jetflow.benchmark.replay import Text
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.protocols import DraftContext
from jetflow.trees.expanders import Chain

HEADS = {
    "causal, no decay": HeadSpec(), "bidirectional, no decay": HeadSpec(causal=False),
    "causal, decay 7": HeadSpec(decay_rate=7.0), "bidirectional, decay 7": HeadSpec(causal=False, decay_rate=7.0),
}  # fmt: skip
EDGES, STRIDE = (5, 10, 20, 40), 12


@torch.no_grad()
def paths(drafter: ParallelDrafter, lab: Lab, text: Text) -> Iterator[tuple[list[int], list[int], float]]:
    """The likeliest whole block behind some roots: the text up to the root, the drafted tokens, their log-probability."""
    ids = torch.tensor([text.token_ids], device=lab.device)
    features = lab.target.features(ids, drafter.taps)[0]
    last = len(text.token_ids) - lab.block_size
    for root in range(text.num_prompt_tokens, last, STRIDE):
        drafter.reset(1)
        drafter.observe(ids[:, :root], features[:, :root], torch.tensor([root], device=lab.device))
        history = text.token_ids[: root + 1]
        context = DraftContext(ids[:, root], torch.tensor([root]), [history], max_depth=lab.block_size - 1)
        tree = drafter.propose(context, lab.block_size)
        yield history, tree.tokens[0, 1:].tolist(), float(tree.scores[0, -1])


@torch.no_grad()
def target_log_prob(lab: Lab, history: list[int], path: list[int]) -> float:
    ids = torch.tensor([history + path], device=lab.device)
    states = lab.target.features(ids, ())[1][:, len(history) - 1 : -1]
    law = lab.target.lm_head(states).float().log_softmax(-1)
    return float(law[0].gather(-1, ids[0, len(history) :, None]).sum())


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    texts = lab.texts(0.0)
    lab.train([(spec, seed) for seed in range(args.seeds) for spec in HEADS.values()], args.workers)
    gaps: dict[str, list[float]] = {}
    shown: dict[str, tuple[float, str, str]] = {}
    for name, spec in HEADS.items():
        gaps[name] = []
        for seed in range(args.seeds):
            drafter = ParallelDrafter(lab.head(spec, seed), lab.target, Chain())
            for text in texts:
                for history, path, draft_log_prob in paths(drafter, lab, text):
                    gap = draft_log_prob - target_log_prob(lab, history, path)
                    gaps[name].append(round(gap, 3))
                    decode = lab.target.tokenizer.decode
                    shown.setdefault(name, (gap, decode(history[-8:]), decode(path)))
    ranges = [f"< {EDGES[0]}", *(f"{a}-{b}" for a, b in pairwise(EDGES)), f">= {EDGES[-1]}"]
    rows = []
    for name, values in gaps.items():
        borders = (float("-inf"), *EDGES, float("inf"))
        shares = [sum(a <= value < b for value in values) / len(values) for a, b in pairwise(borders)]
        middle = [f"{statistics.median(values):.2f}", f"{statistics.fmean(values):.2f}"]
        rows.append([name, *middle, *(f"{one:.0%}" for one in shares)])
    table = print_table(["head", "median gap", "mean", *ranges], rows)
    lines = [f"{name}: behind {before!r} it drafts {path!r}, gap {gap:.1f} nats" for name, (gap, before, path) in shown.items()]
    medians = {name: statistics.median(values) for name, values in gaps.items()}
    holds = [medians[f"causal, {one}"] < medians[f"bidirectional, {one}"] for one in ("no decay", "decay 7")]
    lines.append(
        f"Paper's ordering (causal branches more faithful): without decay {'holds' if holds[0] else 'does not hold'}, with "
        f"decay 7 {'holds' if holds[1] else 'does not hold'} here; medians "
        + ", ".join(f"{name}: {value:.2f}" for name, value in medians.items())
    )

    places = (0, 1, *EDGES, 80)
    series = {name: [(x, sum(one < x for one in values) / len(values)) for x in places] for name, values in gaps.items()}
    title, label = "share of branches whose gap is below so many nats", "gap in nats, draft minus target"
    drawn = {"title": title, "series": series, "x_label": label, "top": 1, "ticks": places}
    results = {"medians": medians, "gaps": gaps}
    write("tree_quality", args, lab, results, tables=[table], lines=lines, charts={"tree_quality": drawn})


if __name__ == "__main__":
    main()
