"""Question: in which setting does the mask of the block matter?

Command:  python examples/ablations/mask_settings.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 30 minutes on two CPU cores, most of it training 30 heads; heads that exist are not trained again.
Expected: the paper (Table 7, Qwen3-8B, budget 256) has a causal head without position weights 52 % ahead of a bidirectional
one. The laboratory has them level. Each line changes one thing in which its heads and the paper's may differ: how random the
answers are, the depth of the head, the size of the block, how fast and how long the head learns.
"""

from dataclasses import replace

from lab import HeadSpec, Lab, Variant
from options import arguments, make_lab
from report import Taus, cells, figures, print_table, write

BUDGETS, TEMPERATURES = (16, 128), (0.0, 1.0)


def settings(lab: Lab) -> dict[str, tuple[Lab, HeadSpec]]:
    """One changed thing a line, with the laboratory and the head that have it."""
    return {
        "as elsewhere": (lab, HeadSpec()),
        "sampled answers": (lab, HeadSpec(data="sampled")),
        "one layer": (replace(lab, num_layers=1), HeadSpec()),
        "blocks of 8": (replace(lab, block_size=8), HeadSpec()),
        "three times the rate": (lab, HeadSpec(rate=3.0)),
        "twice the steps": (lab, HeadSpec(steps=2 * lab.steps)),
    }


def main() -> None:
    args = arguments(__doc__)
    base = make_lab(args)
    found, rows, lines = [], [], []
    for name, (lab, spec) in settings(base).items():
        causal, other = (f"{name}, {mask}" for mask in ("causal", "bidirectional"))
        pair = [
            Variant(causal, spec, BUDGETS, TEMPERATURES),
            Variant(other, replace(spec, causal=False), BUDGETS, TEMPERATURES),
        ]
        mine = lab.run(pair, range(args.seeds), args.workers)
        taus = Taus(mine)
        for temperature in TEMPERATURES:
            for budget in BUDGETS:
                gain, low, high = taus.gain(causal, other, budget, temperature)
                both = [f"{taus.tau(one, budget, temperature):.2f}" for one in (causal, other)]
                rows.append([name, f"{temperature:g}", str(budget), *both, f"{gain:+.1%} ({low:+.1%} to {high:+.1%})"])
                if low > 0 or high < 0:
                    lines.append(f"Beyond doubt: {name}, temperature {temperature:g}, budget {budget}: {gain:+.1%}.")
        found += mine
    head = ["setting", "temperature", "budget", "causal", "bidirectional", "causal over bidirectional"]
    table = print_table(head, rows)
    best = max(rows, key=lambda row: float(row[3]) / float(row[4]))
    lines.append(
        f"Paper's ordering (causal far ahead without position weights): most for it is {best[0]} at temperature {best[1]} and "
        f"budget {best[2]}, {best[3]} against {best[4]}."
    )
    results = {"figures": figures(Taus(found)), "cells": cells(found)}
    write("mask_settings", args, base, results, tables=[table], lines=lines, charts={})


if __name__ == "__main__":
    main()
