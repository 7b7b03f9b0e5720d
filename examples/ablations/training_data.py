"""Question: whose answers should a head learn from: the corpus's, or the target's own, greedy or sampled?

Command:  python examples/ablations/training_data.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 10 minutes on two CPU cores, most of it training 9 heads; heads that exist are not trained again.
Expected: the target's own greedy answers far ahead for greedy decoding. The paper (Table 6, GSM8K, budget 256, greedy) has a
speedup of 7.82 with the target's answers and 3.36 with the corpus's.
"""

from lab import HeadSpec, Variant
from options import arguments, make_lab
from report import Taus, cells, chart, figures, gain_text, show, write

BUDGETS = (8, 16, 32, 64, 128)


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    variants = [Variant(data, HeadSpec(data=data), BUDGETS, (0.0, 1.0)) for data in ("greedy", "sampled", "corpus")]
    found = lab.run(variants, range(args.seeds), args.workers)
    taus = Taus(found)
    tables = [show(taus, f"temperature {t:g}, tau by budget", t) for t in taus.temperatures]
    lines = []
    for t in taus.temperatures:
        for one, other in (("greedy", "corpus"), ("sampled", "corpus"), ("greedy", "sampled")):
            lines.append(gain_text(taus, one, other, 64, t) + (" at temperature 1" if t else ""))
    gain, low, _ = taus.gain("greedy", "corpus", 64)
    lines.append(
        f"Paper's ordering (the target's own answers above the corpus's): {'holds' if low > 0 else 'does not hold'} here, "
        f"{gain:+.0%} tau at budget 64 for greedy decoding."
    )
    charts = {"training_data": chart(taus, "tau by training data and budget")}
    results = {"figures": figures(taus), "cells": cells(found)}
    write("training_data", args, lab, results, tables=tables, lines=lines, charts=charts)


if __name__ == "__main__":
    main()
