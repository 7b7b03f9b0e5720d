"""Question: in which order should candidates get a place in the tree?

Command:  python examples/ablations/scoring.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 5 minutes on two CPU cores with three heads to train; heads that exist are not trained again.
Expected: cumulative log-probability best or level with small entropy weights, entropy alone far behind. The paper (Table 10,
MATH-500, tau): 9.81; entropy 5.52; hybrid 9.81, 9.78, 9.78, 9.63, 9.27, 9.00 at weights 0.25, 0.5, 1, 2, 4, 8.
"""

from functools import partial

from lab import HeadSpec, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, gain_text, show, write

from jetflow.drafters.parallel import ParallelDrafter
from jetflow.scoring import EntropyGuided, Hybrid, cumulative_log_prob
from jetflow.trees.expanders import BestFirst

BUDGETS, WEIGHTS = (8, 16, 32, 64, 128), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def scored(head, target, scoring):
    return ParallelDrafter(head, target, BestFirst(scoring))


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    functions = {"cumulative log-probability": cumulative_log_prob, "entropy": EntropyGuided()}
    functions |= {f"hybrid {weight:g}": Hybrid(weight) for weight in WEIGHTS}
    variants = [
        Variant(name, HeadSpec(), BUDGETS, build=partial(scored, scoring=function)) for name, function in functions.items()
    ]
    found = lab.run(variants, range(args.seeds), args.workers)
    taus = Taus(found)
    table = show(taus, "tau by budget")
    first, *others = functions
    lines = [gain_text(taus, other, first, budget) for other in others for budget in (16, 128)]
    best = max(functions, key=lambda name: taus.tau(name, 64))
    behind = taus.tau("entropy", 64) < min(taus.tau(name, 64) for name in functions if name != "entropy")
    lines.append(
        f"Paper's ordering (cumulative log-probability and small entropy weights ahead, entropy alone last): "
        f"{'holds' if behind and best in (first, 'hybrid 0.25', 'hybrid 0.5') else 'does not hold'} here; best at budget 64 is "
        f"{best} with {taus.tau(best, 64):.2f}, cumulative log-probability has {taus.tau(first, 64):.2f}, entropy "
        f"{taus.tau('entropy', 64):.2f}."
    )
    charts = {"scoring": chart(taus, "tau by scoring function and budget")}
    results = {"figures": figures(taus), "cells": cells(found)}
    write("scoring", args, lab, results, tables=[table], lines=lines, charts=charts)


if __name__ == "__main__":
    main()
