"""Question: how does the learning rate matter, and does it change which loss is ahead?

Command:  python examples/ablations/learning_rate.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 15 minutes on two CPU cores, most of it training 18 heads; heads that exist are not trained again.
Expected: too small is worst, a broad best, and no order of the losses that the rate would turn round. The paper (Table 3,
MATH-500, tau for SFT / forward KL): 8.70 / 8.71 at 5e-5, 9.34 / 9.39 at 1e-4, 9.80 / 9.81 at 3e-4, 9.73 / 9.70 at 6e-4.
"""

from lab import HeadSpec, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, show, write

BUDGETS, FACTORS = (16, 64), (0.3, 1.0, 2.0)
NAMES = {"cross-entropy": "SFT", "forward-kl": "forward KL"}


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    variants = [Variant(f"{NAMES[loss]}, rate x{factor:g}", HeadSpec(loss=loss, rate=factor), BUDGETS)
                for loss in NAMES for factor in FACTORS]  # fmt: skip
    found = lab.run(variants, range(args.seeds), args.workers)
    taus = Taus(found)
    table = show(taus, "tau by budget")
    lines = []
    for loss in NAMES.values():
        best = max(FACTORS, key=lambda factor: taus.tau(f"{loss}, rate x{factor:g}", 64))
        lines.append(f"{loss}: best at x{best:g}, tau {taus.tau(f'{loss}, rate x{best:g}', 64):.2f} at budget 64")
    ahead = {
        factor: taus.tau(f"SFT, rate x{factor:g}", 64) > taus.tau(f"forward KL, rate x{factor:g}", 64) for factor in FACTORS
    }
    worst = all(taus.tau(f"{loss}, rate x{FACTORS[0]:g}", 64) == min(taus.tau(f"{loss}, rate x{f:g}", 64) for f in FACTORS)
                for loss in NAMES.values())  # fmt: skip
    lines.append(
        f"Paper's ordering (the smallest rate is worst; SFT and forward KL level at every rate): the smallest rate is "
        f"{'worst' if worst else 'not worst'} here; SFT is ahead at {sum(ahead.values())} of {len(ahead)} rates."
    )
    charts = {"learning_rate": chart(taus, "tau by learning rate and loss")}
    results = {"figures": figures(taus), "cells": cells(found)}
    write("learning_rate", args, lab, results, tables=[table], lines=lines, charts=charts)


if __name__ == "__main__":
    main()
