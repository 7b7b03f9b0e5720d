r"""Question: what does a correction bring to a head of a real model, where both heads had equal training?

    python -m bench.equal_training

Reads results/smollm2/equal-training/records.jsonl and prints tau by benchmark and budget of both heads, and how much more the
corrected one keeps on the mean of the benchmarks, with 95 % of 2000 resamples of each benchmark's prompts, the same ones for
both heads. A second. The records are of heads made by the four recipes beside them (two hours), measured in half an hour by
  jetflow bench --target smollm2 --head heads/plain heads/corrected --frequent-tokens 8192 --data bench/*.jsonl --skip 1 \
      --count 24 --batch-size 8 --max-new-tokens 64 --dtype bfloat16 --methods plain head --budgets 8 32 --out records.jsonl
"""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jetflow.benchmark.runner import read_records

RECORDS = Path("results/smollm2/equal-training/records.jsonl")
BUDGETS, RESAMPLES = (8, 32), 2000


def kept_and_rounds(records: list[dict], method: str, dataset: str) -> np.ndarray:
    """Kept tokens and rounds of each text, [texts, 2]."""
    rows = [one for one in records if (one["method"], one["dataset"]) == (method, dataset)]
    return np.array([(sum(one["kept"]), len(one["kept"])) for one in sorted(rows, key=lambda one: (one["task"], one["turn"]))])


def main() -> None:
    settings, records = read_records(RECORDS)
    names = list(settings["datasets"])
    table = Table("head", *names, "mean")
    for budget in BUDGETS:
        sums = {
            kind: [kept_and_rounds(records, f"head:{kind}@{budget}", name) for name in names] for kind in ("plain", "corrected")
        }
        means = {}
        for kind, parts in sums.items():
            taus = [part[:, 0].sum() / part[:, 1].sum() for part in parts]
            means[kind] = np.mean(taus)
            table.add_row(f"{kind}@{budget}", *(f"{tau:.2f}" for tau in (*taus, means[kind])))
        generator, drawn = np.random.default_rng(0), []
        for _ in range(RESAMPLES):
            chosen = [generator.integers(len(part), size=len(part)) for part in sums["plain"]]
            plain, corrected = (
                sum(part[rows, 0].sum() / part[rows, 1].sum() for part, rows in zip(sums[kind], chosen, strict=True))
                for kind in ("plain", "corrected")
            )
            drawn.append(corrected / plain - 1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        print(f"budget {budget}: {means['corrected'] / means['plain'] - 1:+.1%} ({low:+.1%} to {high:+.1%})")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
