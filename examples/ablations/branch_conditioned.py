"""Question: what is it worth that the score of a node knows the path before it, and how near does it come to the oracle?

Command:  python examples/ablations/branch_conditioned.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 50 minutes on two CPU cores, most of it training 30 heads; heads that exist are not trained again.
Expected: at least 20 % more tau by a correction at budgets 16 to 64, more by a second pass, most by both. There is nothing in
the JetFlow paper to compare with: its heads draft one law per depth. The oracle drafts with the target's own laws.
"""

from dataclasses import replace
from functools import partial

from lab import Cell, HeadSpec, Lab, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, gain_text, show, write

from jetflow.benchmark.replay import replay
from jetflow.drafters.draft_model import DraftModelDrafter
from jetflow.drafters.eagle import EagleDrafter
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.trees.expanders import BestFirst

BUDGETS, TEMPERATURES = (8, 16, 32, 64, 128, 256), (0.0, 1.0)
ORACLE, ORACLE_BUDGETS, ORACLE_TEXTS = "oracle (the target drafts)", (16,), 16
MARGINAL, PAIRWISE, BOTH, THREE = "marginal", "pairwise", "pairwise, two passes", "pairwise, three passes"
OLDER = ", twice the steps"
DRAWN = (MARGINAL, PAIRWISE, THREE, "EAGLE-3", PAIRWISE + OLDER, THREE + OLDER)


def passes(head, target, count):
    return ParallelDrafter(head, target, passes=count)


def eagle(head, target, depth):
    return EagleDrafter(head, target, depth=depth)


def oracle(lab: Lab, seeds: int, temperatures: tuple[float, ...]) -> list[Cell]:
    """The target as its own drafter, on some of the texts; the others count nothing."""
    drafter = DraftModelDrafter(lab.target, lab.target, BestFirst(), depth=lab.block_size - 1, width=8)
    found = []
    for temperature in temperatures:
        texts = lab.texts(temperature)
        chosen = range(0, len(texts), max(1, len(texts) // ORACLE_TEXTS))
        for budget in ORACLE_BUDGETS:
            sums, counts = [0] * len(texts), [0] * len(texts)
            for place in chosen:
                (kept,) = replay(drafter, lab.target, [texts[place]], budget, max_new_tokens=lab.max_new_tokens)
                sums[place], counts[place] = sum(kept), len(kept)
            found += [Cell(ORACLE, seed, budget, temperature, sums, counts) for seed in range(seeds)]
    return found


def main() -> None:
    args = arguments(__doc__, budgets=BUDGETS, temperatures=TEMPERATURES)
    lab = make_lab(args)
    budgets, temperatures = tuple(map(int, args.budgets)), tuple(args.temperatures)
    variant = partial(Variant, budgets=budgets, temperatures=temperatures)
    pairwise, refined = HeadSpec(correction="gated"), HeadSpec(refinement=True)
    both, twice = HeadSpec(correction="gated", refinement=True), partial(replace, steps=2 * lab.steps)
    variants = [
        variant(MARGINAL, HeadSpec()),
        variant("bidirectional", HeadSpec(causal=False)),
        variant(PAIRWISE, pairwise),
        variant("recurrent", HeadSpec(correction="recurrent")),
        variant("marginal, two passes", refined, build=partial(passes, count=2)),
        variant("pairwise, one pass of the same head", both),
        variant(BOTH, both, build=partial(passes, count=2)),
        variant(THREE, both, build=partial(passes, count=3)),
        variant("EAGLE-3", HeadSpec(kind="eagle3"), build=partial(eagle, depth=lab.block_size - 1)),
        variant(MARGINAL + OLDER, twice(HeadSpec())),
        variant(PAIRWISE + OLDER, twice(pairwise)),
        variant(THREE + OLDER, twice(both), build=partial(passes, count=3)),
    ]
    found = lab.run(variants, range(args.seeds), args.workers) + oracle(lab, args.seeds, temperatures)
    taus = Taus(found)
    tables = [show(taus, f"temperature {t:g}, tau by budget", t) for t in taus.temperatures]
    lines = []
    for t in temperatures:
        when = " at temperature 1" if t else ""
        for budget in (one for one in (16, 32, 64) if one in budgets):
            lines.append(gain_text(taus, PAIRWISE, MARGINAL, budget, t) + when)
            lines.append(gain_text(taus, BOTH, PAIRWISE, budget, t) + when)
            lines.append(gain_text(taus, THREE, PAIRWISE, budget, t) + when)
            lines.append(gain_text(taus, PAIRWISE + OLDER, MARGINAL + OLDER, budget, t) + when)
            lines.append(gain_text(taus, THREE + OLDER, PAIRWISE + OLDER, budget, t) + when)
        bottom, top = taus.tau(MARGINAL, 16, t), taus.tau(ORACLE, 16, t)
        if top > bottom:
            for one in (PAIRWISE, "recurrent", BOTH, THREE, "EAGLE-3", PAIRWISE + OLDER, THREE + OLDER):
                closed = (taus.tau(one, 16, t) - bottom) / (top - bottom)
                lines.append(
                    f"{one} closes {closed:.0%} of the gap from marginal ({bottom:.2f}) to oracle ({top:.2f}) at 16{when}"
                )
    best = max((taus.tau(one.name, 16), one.name) for one in variants)
    lines.append(f"Best at budget 16 and temperature 0: {best[1]} with tau {best[0]:.2f}.")
    charts = {
        "branch_conditioned": chart(taus, "tau by what the scores know, greedy", 0.0, DRAWN),
        "branch_conditioned-sampled": chart(taus, "tau by what the scores know, temperature 1", 1.0, DRAWN),
    }
    results = {"figures": figures(taus), "cells": cells(found)}
    write("branch_conditioned", args, lab, results, tables=tables, lines=lines, charts=charts)


if __name__ == "__main__":
    main()
