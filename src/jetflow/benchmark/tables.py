"""From records to figures: speedups and tau with intervals, checked before anything is printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from jetflow.benchmark.accuracy import final_answer, passes_tests, same_answer
from jetflow.benchmark.runner import BASELINE, read_records

# Settings that must be equal where several files are joined.
SHARED = ("target", "fingerprint", "dtype", "temperature", "max_new_tokens", "batch_size", "datasets", "seed")
RESAMPLES, LEVEL = 2000, 0.95
# Phases that are passes of a model.
FORWARDS = ("prefill", "draft", "verify")
Interval = tuple[float, float]
SIMULATED = "simulated:"
NOTE = "Simulated: trees were given the target's own text at the rate in the name. No head was measured."


@dataclass(frozen=True)
class Figures:
    """One method on one benchmark.

    Attributes:
        dataset: the benchmark.
        method: the method.
        tokens_per_second: all new tokens by all seconds, prompts included.
        speedup: that rate by the one of plain decoding, over the same prompts.
        speedup_interval: 95 % of resamples of the prompts, pairs kept together.
        tau: kept tokens per verified tree, over all rounds; None where rounds are not known.
        tau_interval: 95 % of the same resamples.
        texts_equal: texts whose ids are those of plain decoding.
        num_texts: all texts.
        outside_share: share of the rounds' time spent outside the two models' passes; None where it is not known.
        phases: seconds of all texts by phase; empty where they are not known.
        peak_bytes: most memory in use while a text was written, weights included; None where it is not known.
        accepted_by_depth: share of the rounds that accepted a node of depth 1, 2, ...
        ranks: share of the accepted nodes that were their parent's first, second, ... child.
    """

    dataset: str
    method: str
    tokens_per_second: float
    speedup: float
    speedup_interval: Interval
    tau: float | None
    tau_interval: Interval | None
    texts_equal: int
    num_texts: int
    outside_share: float | None
    phases: dict[str, float]
    peak_bytes: int | None
    accepted_by_depth: list[float]
    ranks: list[float]


def read_results(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads results files of one setting and joins their methods.

    Raises:
        ValueError: files differ in a setting that all methods must share, a text is missing, simulated methods stand beside
            measured ones, or, in greedy float32 runs, a text is not that of plain decoding.
    """
    settings, records = read_records(paths[0])
    methods = list(settings["methods"])
    for path in paths[1:]:
        other, more = read_records(path)
        for name in SHARED:
            if settings.get(name) != other.get(name):
                raise ValueError(f"{path} has {name}={other.get(name)}, but {paths[0]} has {settings.get(name)}")
        for name in other["methods"]:
            drafts = name in methods and name != BASELINE
            if drafts and any(settings.get(one) != other.get(one) for one in ("head", "head_fingerprints", "draft")):
                raise ValueError(f"{path} and {paths[0]} both hold {name}, but of different heads or draft models")
        methods += [name for name in other["methods"] if name not in methods]
        records += [one for one in more if one["method"] not in settings["methods"]]
    settings = {**settings, "methods": methods}
    refuse_mixture(methods)
    check(settings, records)
    return settings, records


def refuse_mixture(methods: Iterable[str]) -> None:
    """Raises ValueError where simulated methods stand beside others than plain decoding."""
    simulated = [name for name in methods if name.startswith(SIMULATED)]
    measured = [name for name in methods if not name.startswith(SIMULATED) and name != BASELINE]
    if simulated and measured:
        raise ValueError(f"simulated and measured methods must not share a table, got {simulated[0]} and {measured[0]}")


def check(settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where a text is missing or, in greedy float32 runs, differs from plain decoding."""
    by_prompt: dict[tuple[str, str, int], dict[str, list[int]]] = {}
    for one in records:
        by_prompt.setdefault((one["dataset"], one["task"], one["turn"]), {})[one["method"]] = one["token_ids"]
    found = {dataset for dataset, _, _ in by_prompt}
    if found != set(settings["datasets"]):
        raise ValueError(f"results must hold the datasets {sorted(settings['datasets'])}, found {sorted(found)}")
    exact = settings["dtype"] == "float32" and settings["temperature"] == 0
    for (dataset, task, turn), texts in by_prompt.items():
        missing = [name for name in settings["methods"] if name not in texts]
        if missing:
            raise ValueError(f"{dataset}, {task}, turn {turn}: no text of {missing[0]}; run the benchmark to its end")
        for name, ids in texts.items():
            if exact and ids != texts[BASELINE]:
                raise ValueError(f"{dataset}, {task}, turn {turn}: the text of {name} is not that of plain decoding")


def figures_of(settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Figures]:
    """Figures of every benchmark and method, in the order of the settings."""
    found = []
    for dataset in settings["datasets"]:
        rows = {name: _rows(records, dataset, name) for name in settings["methods"]}
        plain = rows[BASELINE]
        # The same prompts in the same order for every method.
        generator = np.random.default_rng(0)
        samples = generator.integers(len(plain), size=(RESAMPLES, len(plain)))
        found += [_figures(dataset, name, rows[name], plain, samples) for name in settings["methods"]]
    return found


def accuracies(records: Sequence[Mapping[str, Any]], *, run_code: bool = False) -> dict[tuple[str, str], tuple[int, int]]:
    """Counts right answers by benchmark and method: (right, answered), for texts with a reference or, if wanted, tests.

    Args:
        records: of all texts.
        run_code: also run written programs against their tests, in processes of their own.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in records:
        if one.get("reference") is not None:
            right = same_answer(final_answer(one["text"]), one["reference"])
        elif run_code and one.get("tests"):
            right = passes_tests(one["text"], one["tests"])
        else:
            continue
        before, answered = found.get((one["dataset"], one["method"]), (0, 0))
        found[one["dataset"], one["method"]] = (before + right, answered + 1)
    return found


def markdown(figures: Sequence[Figures]) -> str:
    """One table: methods down, benchmarks across, speedup with its interval and tau; simulated ones are said to be so."""
    datasets = list(dict.fromkeys(one.dataset for one in figures))
    lines = ["| method | " + " | ".join(datasets) + " | mean tau |", "|" + "---|" * (len(datasets) + 2)]
    for method in dict.fromkeys(one.method for one in figures):
        cells, taus = [], []
        for dataset in datasets:
            one = next(each for each in figures if (each.dataset, each.method) == (dataset, method))
            low, high = one.speedup_interval
            cell = f"{one.speedup:.2f}x ({low:.2f} to {high:.2f})"
            if one.tau is not None:
                cell += f", tau {one.tau:.2f}"
                taus.append(one.tau)
            cells.append(cell)
        mean = f"{sum(taus) / len(taus):.2f}" if taus else "-"
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {mean} |")
    if any(one.method.startswith(SIMULATED) for one in figures):
        lines += ["", NOTE]
    return "\n".join(lines)


def console_table(figures: Sequence[Figures]) -> Table:
    """The same for a terminal of 80 columns: a group of rows for each benchmark, and one of means over them."""
    table = Table(
        Column("method", overflow="fold"),
        "tau",
        "tokens/s",
        "speedup",
        "95 %",
        "texts equal",
        "peak GiB",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    by_method: dict[str, list[Figures]] = {}
    for one in figures:
        by_method.setdefault(one.method, []).append(one)
    for dataset in dict.fromkeys(one.dataset for one in figures):
        table.add_section()
        table.add_row(f"[bold]{dataset}[/bold]")
        for one in (each for each in figures if each.dataset == dataset):
            low, high = one.speedup_interval
            tau, rate, equal = _number(one.tau), f"{one.tokens_per_second:.1f}", f"{one.texts_equal} of {one.num_texts}"
            memory = _number(None if one.peak_bytes is None else one.peak_bytes / 2**30)
            table.add_row(one.method, tau, rate, f"{one.speedup:.2f}x", f"{low:.2f} to {high:.2f}", equal, memory)
    count = len(next(iter(by_method.values()), []))
    if count > 1:
        table.add_section()
        table.add_row(f"[bold]mean of {count}[/bold]", "", "", "geometric")
        for method, mine in by_method.items():
            taus = [one.tau for one in mine if one.tau is not None]
            speedup = math.exp(sum(math.log(one.speedup) for one in mine) / count)
            table.add_row(method, _number(sum(taus) / len(taus) if taus else None), "", f"{speedup:.2f}x")
    if any(one.method.startswith(SIMULATED) for one in figures):
        table.caption = NOTE
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rows(records: Sequence[Mapping[str, Any]], dataset: str, method: str) -> list[Mapping[str, Any]]:
    rows = [one for one in records if one["dataset"] == dataset and one["method"] == method]
    return sorted(rows, key=lambda one: (one["task"], one["turn"]))


def _figures(
    dataset: str, method: str, rows: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], samples: np.ndarray
) -> Figures:
    tokens, seconds = (
        np.array(column, dtype=float) for column in zip(*((len(o["token_ids"]), o["seconds"]) for o in rows), strict=True)
    )
    base, base_seconds = (
        np.array(column, dtype=float) for column in zip(*((len(o["token_ids"]), o["seconds"]) for o in plain), strict=True)
    )
    rate, base_rate = tokens.sum() / seconds.sum(), base.sum() / base_seconds.sum()
    resampled = (tokens[samples].sum(1) / seconds[samples].sum(1)) / (base[samples].sum(1) / base_seconds[samples].sum(1))
    kept, counts = np.array([sum(o["kept"]) for o in rows], dtype=float), np.array([len(o["kept"]) for o in rows], dtype=float)
    known = counts.sum() > 0
    accepted = [count for o in rows for count in o["accepted"]]
    deepest = max(accepted, default=0)
    ranks = np.zeros(max((len(o["ranks"]) for o in rows), default=0))
    for one in rows:
        ranks[: len(one["ranks"])] += one["ranks"]
    phases: dict[str, float] = {}
    for one in rows:
        for name, value in one["phases"].items():
            phases[name] = phases.get(name, 0.0) + value
    inside = sum(value for name, value in phases.items() if name in FORWARDS and name != "prefill")
    rounds = seconds.sum() - phases.get("prefill", 0.0)
    return Figures(
        dataset=dataset,
        method=method,
        tokens_per_second=float(rate),
        speedup=float(rate / base_rate),
        speedup_interval=_interval(resampled),
        tau=float(kept.sum() / counts.sum()) if known else None,
        tau_interval=_interval(kept[samples].sum(1) / counts[samples].sum(1).clip(min=1)) if known else None,
        texts_equal=sum(a["token_ids"] == b["token_ids"] for a, b in zip(rows, plain, strict=True)),
        num_texts=len(rows),
        outside_share=float(1 - inside / rounds) if phases and rounds > 0 else None,
        phases=phases,
        peak_bytes=max((o["peak_bytes"] for o in rows if o.get("peak_bytes") is not None), default=None),
        accepted_by_depth=[sum(count >= depth for count in accepted) / len(accepted) for depth in range(1, deepest + 1)],
        ranks=(ranks / ranks.sum()).tolist() if ranks.sum() else [],
    )


def _interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
