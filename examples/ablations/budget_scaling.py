"""Question: how does tau grow with the budget, and how much of it is the mask's doing and how much the expansion's?

Command:  python examples/ablations/budget_scaling.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 10 minutes on two CPU cores with six heads to train; heads that exist are not trained again.
Expected: trees grow with the budget where a chain stops at its block, and the exact expansion needs a fraction of the nodes of
the published one. The paper (Table 2, MATH-500): DDTree 7.16, 9.19, 9.81 and JetSpec 7.42, 9.95, 10.76 at 64, 128, 256.
"""

from functools import partial
from itertools import pairwise

from lab import HeadSpec, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, gain_text, show, write

from jetflow.drafters.parallel import ParallelDrafter
from jetflow.trees.expanders import BestFirst, Chain, FanoutBestFirst

BUDGETS = (8, 16, 32, 64, 128, 256)
# What DFlash's authors use for blocks of 16, so that the comparison is fair.
DFLASH = HeadSpec(causal=False, decay_rate=7.0)


def expanded(head, target, expander):
    return ParallelDrafter(head, target, expander)


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    variant = partial(Variant, temperatures=(0.0, 1.0))
    shapes = {
        "exact": (BestFirst(), BUDGETS),
        "published": (FanoutBestFirst(4), BUDGETS),
        "chain": (Chain(), tuple(one for one in BUDGETS if one <= lab.block_size)),
    }
    variants = [
        variant(f"{name}, {shape}", spec, budgets, build=partial(expanded, expander=expander))
        for name, spec in (("JetFlow", HeadSpec()), ("DFlash", DFLASH))
        for shape, (expander, budgets) in shapes.items()
    ]
    found = lab.run(variants, range(args.seeds), args.workers)
    taus = Taus(found)
    tables = [show(taus, f"temperature {t:g}, tau by budget", t) for t in taus.temperatures]
    lines = []
    for t in taus.temperatures:
        when = " at temperature 1" if t else ""
        for budget in (16, 64, 256):
            lines.append(gain_text(taus, "JetFlow, exact", "DFlash, exact", budget, t) + when)
            lines.append(gain_text(taus, "JetFlow, exact", "JetFlow, published", budget, t) + when)
        wanted = taus.tau("JetFlow, published", 256, t)
        enough = next(one for one in BUDGETS if taus.tau("JetFlow, exact", one, t) >= wanted)
        lines.append(
            f"The exact expansion has the tau of the published one at 256 nodes ({wanted:.2f}) with {enough} nodes{when}."
        )
    grows = all(taus.tau("JetFlow, exact", a) < taus.tau("JetFlow, exact", b) for a, b in pairwise(BUDGETS))
    ahead = taus.gain("JetFlow, exact", "DFlash, exact", 256)[1] > 0
    lines.append(
        f"Paper's ordering: tau grows with every budget {'here, too' if grows else '- not here'}; JetFlow's tree above "
        f"DFlash's at 256 nodes: {'beyond doubt' if ahead else 'not beyond doubt'} here."
    )
    charts = {"budget_scaling": chart(taus, "tau by budget, method and expansion")}
    results = {"figures": figures(taus), "cells": cells(found)}
    write("budget_scaling", args, lab, results, tables=tables, lines=lines, charts=charts)


if __name__ == "__main__":
    main()
