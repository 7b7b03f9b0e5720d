"""Plots of benchmark figures: speedup by benchmark, tau and speedup by budget, acceptance by depth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jetflow.benchmark.tables import Figures


def published(method: str, temperature: float) -> dict[str, float]:
    """Returns the published speedup of a method, such as `JetSpec 64`, by benchmark; see `published.json` for the setting.

    Raises:
        ValueError: there is no such row.
    """
    rows = json.loads((Path(__file__).parent / "published.json").read_text())["rows"]
    named = {f"{row['method']} {row['budget']}": row for row in rows if row["temperature"] == temperature}
    if method not in named:
        raise ValueError(f"no published figures of {method!r} at temperature {temperature:g}; there are {', '.join(named)}")
    return {name: figures["speedup"] for name, figures in named[method]["figures"].items()}


def draw(figures: Sequence[Figures], folder: Path, references: Mapping[str, Mapping[str, float]] | None = None) -> list[Path]:
    """Writes `speedup.png`, `acceptance.png` and, where methods are named `NAME@BUDGET`, `budgets.png`.

    Args:
        figures: of all benchmarks and methods.
        folder: where the files go.
        references: speedups by benchmark that are drawn as dashed lines behind the bars, by name; figures of other machines
            and models, which no bar is to be compared with number by number.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "speedup.png", folder / "acceptance.png"]
    _speedups(figures, paths[0], references or {})
    _acceptance(figures, paths[1])
    if any("@" in one.method for one in figures):
        paths.append(folder / "budgets.png")
        _budgets(figures, paths[2])
    return paths


def _speedups(figures: Sequence[Figures], path: Path, references: Mapping[str, Mapping[str, float]]) -> None:
    from matplotlib import pyplot

    datasets = list(dict.fromkeys(one.dataset for one in figures))
    methods = list(dict.fromkeys(one.method for one in figures))
    figure, axis = pyplot.subplots(figsize=(1.6 * len(datasets) + 3, 4), layout="constrained")
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        mine = [next(one for one in figures if (one.dataset, one.method) == (dataset, method)) for dataset in datasets]
        places = [place + (index - (len(methods) - 1) / 2) * width for place in range(len(datasets))]
        errors = [
            [one.speedup - one.speedup_interval[0] for one in mine],
            [one.speedup_interval[1] - one.speedup for one in mine],
        ]
        axis.bar(places, [one.speedup for one in mine], width, yerr=errors, label=method, error_kw={"linewidth": 0.8})
    for number, (name, speedups) in enumerate(references.items()):
        known = [place for place, dataset in enumerate(datasets) if dataset in speedups]
        values = [speedups[datasets[place]] for place in known]
        edges = ([place - 0.45 for place in known], [place + 0.45 for place in known])
        axis.hlines(values, *edges, colors=f"C{9 - number}", linestyles="dashed", label=f"published: {name}")
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.set_xticks(range(len(datasets)), datasets)
    axis.set_ylabel("speedup over plain decoding")
    axis.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _budgets(figures: Sequence[Figures], path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = dict.fromkeys((one.dataset, one.method.split("@")[0]) for one in figures if "@" in one.method)
    for dataset, name in names:
        mine = [one for one in figures if one.dataset == dataset and one.method.startswith(f"{name}@")]
        budgets = [int(one.method.split("@")[1]) for one in mine]
        left.plot(budgets, [one.tau for one in mine], marker="o", label=f"{dataset}, {name}")
        right.plot(budgets, [one.speedup for one in mine], marker="o", label=f"{dataset}, {name}")
    left.set(title="tau", xlabel="budget (nodes per tree)", ylabel="tokens per target pass", xscale="log")
    right.set(title="speedup", xlabel="budget (nodes per tree)", ylabel="over plain decoding", xscale="log")
    left.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _acceptance(figures: Sequence[Figures], path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method in dict.fromkeys(one.method for one in figures if one.accepted_by_depth):
        curves = [one.accepted_by_depth for one in figures if one.method == method]
        deepest = max(len(curve) for curve in curves)
        means = [sum(curve[d] if d < len(curve) else 0.0 for curve in curves) / len(curves) for d in range(deepest)]
        axis.plot(range(1, deepest + 1), means, marker=".", label=method)
    axis.set(title="acceptance by depth", xlabel="depth", ylabel="share of rounds", ylim=(0, 1))
    if axis.has_data():
        axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
