"""From cells to figures: tau with intervals, tables, JSON and plots of an ablation."""

from __future__ import annotations

import json
import math
import platform
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench.svg import SCHEMES
from bench.svg import lines as draw_lines
from lab import ROOT, Cell, Lab
from rich.console import Console
from rich.table import Table

RESAMPLES = 2000


class Taus:
    """tau of every variant, budget and temperature, over seeds and prompts, with 95 % intervals.

    Both seeds and prompts are resampled, the same ones for all variants, so that differences are paired.
    """

    def __init__(self, cells: Sequence[Cell]):
        self.variants = list(dict.fromkeys(cell.variant for cell in cells))
        self.budgets = sorted({cell.budget for cell in cells})
        self.temperatures = sorted({cell.temperature for cell in cells})
        seeds, num_prompts = sorted({cell.seed for cell in cells}), len(cells[0].kept)
        generator = np.random.default_rng(0)
        self._seeds = generator.integers(len(seeds), size=(RESAMPLES, len(seeds)))
        self._prompts = generator.integers(num_prompts, size=(RESAMPLES, num_prompts))
        self._sums: dict[tuple[str, int, float], np.ndarray] = {}
        for cell in cells:
            place = self._sums.setdefault((cell.variant, cell.budget, cell.temperature), np.zeros((2, len(seeds), num_prompts)))
            place[:, seeds.index(cell.seed)] = cell.kept, cell.rounds

    def tau(self, variant: str, budget: int, temperature: float = 0.0) -> float:
        kept, rounds = self._sums[variant, budget, temperature]
        return float(kept.sum() / rounds.sum())

    def by_seed(self, variant: str, budget: int, temperature: float = 0.0) -> list[float]:
        kept, rounds = self._sums[variant, budget, temperature]
        return (kept.sum(1) / rounds.sum(1)).tolist()

    def interval(self, variant: str, budget: int, temperature: float = 0.0) -> tuple[float, float]:
        return _interval(self._resampled(variant, budget, temperature))

    def gain(self, variant: str, over: str, budget: int, temperature: float = 0.0) -> tuple[float, float, float]:
        """How much more tau `variant` has than `over`, as a share, with the interval of the paired ratio."""
        ratio = self._resampled(variant, budget, temperature) / self._resampled(over, budget, temperature)
        mean = self.tau(variant, budget, temperature) / self.tau(over, budget, temperature)
        low, high = _interval(ratio)
        return mean - 1, low - 1, high - 1

    def has(self, variant: str, budget: int, temperature: float) -> bool:
        return (variant, budget, temperature) in self._sums

    def _resampled(self, variant: str, budget: int, temperature: float) -> np.ndarray:
        chosen = self._sums[variant, budget, temperature][:, self._seeds]  # [2, R, seeds, prompts]
        sums = np.take_along_axis(chosen.sum(2), self._prompts[None].repeat(2, 0), axis=2).sum(2)
        return sums[0] / sums[1]


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def show(taus: Taus, title: str, temperature: float = 0.0) -> str:
    """Prints a table, variants down and budgets across, and returns it as Markdown."""
    rows = []
    for variant in taus.variants:
        row = [variant]
        for budget in taus.budgets:
            if not taus.has(variant, budget, temperature):
                row.append("-")
                continue
            low, high = taus.interval(variant, budget, temperature)
            row.append(f"{taus.tau(variant, budget, temperature):.2f} ({low:.2f} to {high:.2f})")
        rows.append(row)
    return print_table([title, *map(str, taus.budgets)], rows)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Prints a table and returns it as Markdown."""
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def gain_text(taus: Taus, variant: str, over: str, budget: int, temperature: float = 0.0) -> str:
    mean, low, high = taus.gain(variant, over, budget, temperature)
    return f"{variant} over {over} at budget {budget}: {mean:+.1%} ({low:+.1%} to {high:+.1%})"


def write(
    name: str,
    args: Namespace,
    lab: Lab,
    results: dict[str, Any],
    *,
    tables: Sequence[str],
    lines: Sequence[str],
    charts: Mapping[str, dict[str, Any]],
) -> None:
    """Prints the conclusions and writes `NAME.json`, `NAME.md` and charts; quick and smoke runs do only if told where.

    Args:
        name: of the ablation.
        args: options of the script.
        lab: the laboratory.
        results: what else goes into the JSON.
        tables: in Markdown.
        lines: the conclusions.
        charts: arguments of `bench.svg.lines` by name.
    """
    for line in lines:
        print(line)
    folder = args.out or (None if args.smoke or args.quick else ROOT / "results" / "ablations")
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in asdict(lab).items() if key not in ("work", "target_name")}
    report = {
        "command": " ".join([f"python examples/ablations/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "target": Path(args.target).relative_to(ROOT).as_posix() if Path(args.target).is_relative_to(ROOT) else args.target,
        "settings": settings | {"seeds": args.seeds},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "conclusions": list(lines),
        **results,
        "charts": charts,
    }
    (folder / f"{name}.json").write_text(json.dumps(report, default=str) + "\n")
    (folder / f"{name}.md").write_text("\n\n".join([*tables, "\n".join(f"- {line}" for line in lines)]) + "\n")
    for title, one in charts.items():
        (folder / f"{title}.svg").write_text(draw_lines(SCHEMES["light"], **one))
    print(f"written: {folder / name}.json, .md and charts")


def figures(taus: Taus) -> list[dict[str, Any]]:
    """All taus as plain values, for the results file."""
    found = []
    for variant in taus.variants:
        for temperature in taus.temperatures:
            for budget in taus.budgets:
                if taus.has(variant, budget, temperature):
                    key = (variant, budget, temperature)
                    found.append({
                        "variant": variant, "temperature": temperature, "budget": budget, "tau": round(taus.tau(*key), 3),
                        "interval": [round(value, 3) for value in taus.interval(*key)],
                        "by_seed": [round(value, 3) for value in taus.by_seed(*key)],
                    })  # fmt: skip
    return found


def cells(found: Sequence[Cell]) -> list[dict[str, Any]]:
    return [asdict(cell) for cell in found]


def chart(taus: Taus, title: str, temperature: float = 0.0, variants: Sequence[str] | None = None) -> dict[str, Any]:
    """What `bench.svg.lines` draws: tau against budget with intervals, of all variants or of those that are named."""
    series, bands = {}, {}
    for variant in taus.variants if variants is None else variants:
        budgets = [one for one in taus.budgets if taus.has(variant, one, temperature)]
        if budgets:
            series[variant] = [(one, round(taus.tau(variant, one, temperature), 3)) for one in budgets]
            bands[variant] = [(one, *(round(end, 3) for end in taus.interval(variant, one, temperature))) for one in budgets]
    top = 4 * math.ceil(max(high for band in bands.values() for _, _, high in band) / 4)
    return {"title": title, "series": series, "bands": bands, "x_label": "budget (nodes per tree)", "top": top,
            "ticks": taus.budgets}  # fmt: skip
