"""Question: which loss should a head be trained with?

Command:  python examples/ablations/losses.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 25 minutes on two CPU cores, most of it training 27 heads; heads that exist are not trained again.
Expected: cross-entropy and forward KL close together, reverse KL far behind. The paper (Table 4, MATH-500, tau at budget 256)
has 9.98 for cross-entropy (SFT), 10.01 for forward KL and 6.59 for reverse KL. The expected acceptance length of the tree that
is served, here of 16 nodes, is not in the paper: alone it is behind both, and beside forward KL it changes next to nothing.
"""

from lab import LOSSES, HeadSpec, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, gain_text, show, write

BUDGETS = (8, 16, 32, 64, 128)
FORWARD = "forward-kl"
# The loss of the tree beside forward KL, by weight.
TREES = {f"{FORWARD} + {weight:g} tree-acceptance": weight for weight in (1.0, 4.0)}


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    specs = {name: HeadSpec(loss=name) for name in LOSSES} | {name: HeadSpec(tree_weight=w) for name, w in TREES.items()}
    variants = [Variant(name, spec, BUDGETS, (0.0, 1.0)) for name, spec in specs.items()]
    found = lab.run(variants, range(args.seeds), args.workers)
    taus = Taus(found)
    tables = [show(taus, f"temperature {t:g}, tau by budget", t) for t in taus.temperatures]
    lines = [
        gain_text(taus, FORWARD, other, 64, t) + (" at temperature 1" if t else "")
        for t in taus.temperatures
        for other in LOSSES
        if other != FORWARD
    ]
    lines += [
        gain_text(taus, name, FORWARD, budget, t) + (" at temperature 1" if t else "")
        for t in taus.temperatures
        for name in TREES
        for budget in (16, 64)
    ]
    order = [taus.tau(name, 64) for name in (FORWARD, "cross-entropy", "reverse-kl")]
    holds = order[2] < min(order[:2])
    first = "forward KL" if order[0] > order[1] else "cross-entropy"
    lines.append(
        f"Paper's ordering (forward KL and cross-entropy level, reverse KL far behind): "
        f"{'holds' if holds else 'does not hold'} here at temperature 0; ahead is {first} "
        f"({order[0]:.2f}, {order[1]:.2f} and {order[2]:.2f} at budget 64)."
    )
    charts = {"losses": chart(taus, "tau by loss and budget", variants=[*LOSSES, next(iter(TREES))])}
    results = {"figures": figures(taus), "cells": cells(found)}
    write("losses", args, lab, results, tables=tables, lines=lines, charts=charts)


if __name__ == "__main__":
    main()
