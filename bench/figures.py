"""Question: what do the committed results look like?

    python -m bench.figures [FOLDER]        (docs/assets/figures when absent)

Draws the figures of the docs from results/ and docs/assets/round.json, each in light and dark, as SVG: the same results
give the same bytes, and a test compares them. Under a second. Expected: the files are those that are committed.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.svg import SCHEMES, WIDTH, Drawing, Scheme, bars, lines

from jetflow.benchmark.runner import read_records
from jetflow.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "docs" / "assets" / "figures", ROOT / "results"
DATASETS = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench"]
BUDGET_TICKS = (1, 8, 16, 32, 64, 128)


def one_round(scheme: Scheme, budget: int = 32, deepest: int = 6) -> str:
    """The recorded round in its four steps: the laws and the tree as far down as it fits, the accepted path marked."""
    record = json.loads((ROOT / "docs" / "assets" / "round.json").read_text())
    nodes = record["nodes"][:budget]
    shown = [i for i, node in enumerate(nodes) if node["depth"] <= deepest]
    accepted = {0, *(node for node in record["accepted"] if node < budget)}
    labels = {i: visible(nodes[i]["text"]) for i in shown}
    at_depth = [[i for i in shown if nodes[i]["depth"] == depth] for depth in range(deepest + 1)]
    columns = [8.0]
    for depth in range(deepest):
        columns.append(columns[-1] + 7 * max(len(labels[i]) for i in at_depth[depth]) + 44)
    rows = leaf_rows(nodes, shown)
    tree_top = 168
    height = tree_top + 19 * (max(rows.values()) + 1) + 46
    drawing = Drawing(height, scheme, "One round: laws, the tree drafted from them, the target's path in it, the text it adds")
    drawing.text(8, 18, "the text so far: ... " + record["before"].splitlines()[-1][-34:])
    drawing.text(8, 46, "1 draft: the head's likeliest tokens of each depth", weight="bold")
    drawing.text(8, 64, "root")
    for depth in range(1, deepest + 1):
        drawing.text(columns[depth], 64, f"depth {depth}")
        law = {labels[i]: nodes[i]["probability"] for i in at_depth[depth]}
        for place, (label, probability) in enumerate(sorted(law.items(), key=lambda one: -one[1])[:3]):
            drawing.text(columns[depth], 82 + 17 * place, f"{label} {probability:.2f}")
    drawing.text(8, 146, "2 expand: the likeliest paths. 3 verify: the target's own", weight="bold")
    accent = scheme.colours[0]
    place_of = {i: (columns[nodes[i]["depth"]], tree_top + 19 * rows[i]) for i in shown}
    for i in shown[1:]:
        (x, y), (parent_x, parent_y), kept = place_of[i], place_of[nodes[i]["parent"]], i in accepted
        start = parent_x + 6 + 7 * len(labels[nodes[i]["parent"]])
        drawing.line(start, parent_y - 4, x - 5, y - 4, accent if kept else scheme.faint, 2 if kept else 1)
    for i in shown:
        colour, weight = (accent, "bold") if i in accepted else (scheme.text, "normal")
        drawing.text(*place_of[i], labels[i], colour=colour, weight=weight)
    kept_text = visible("".join(nodes[i]["text"] for i in sorted(accepted)[1:]) + record["bonus"])
    drawing.text(8, height - 28, f"4 commit: {len(accepted)} tokens from one pass of the target", weight="bold")
    drawing.text(8, height - 8, kept_text, colour=accent, weight="bold")
    return drawing.svg()


def leaf_rows(nodes: Sequence[dict], shown: Sequence[int]) -> dict[int, float]:
    """The row of each node: leaves get rows of their own, a parent stands in the middle of its children."""
    rows: dict[int, float] = {}
    leaves: list[int] = []

    def lay_out(node: int) -> None:
        below = [i for i in shown if nodes[i]["parent"] == node]
        for child in below:
            lay_out(child)
        if below:
            rows[node] = (rows[below[0]] + rows[below[-1]]) / 2
        else:
            rows[node] = float(len(leaves))
            leaves.append(node)

    lay_out(0)
    return rows


def visible(text: str) -> str:
    """A token with its blanks and line ends shown."""
    return text.replace("\n", "\u21b5").replace(" ", "\u00b7")


def tiny_budgets(scheme: Scheme) -> str:
    """tau and speedup of the tiny pair by budget."""
    found = {row["name"]: row for row in json.loads((RESULTS / "tiny.json").read_text())["results"]}
    rows = [(1, found["autoregressive"])] + [(size, found[f"JetFlow, budget {size}"]) for size in BUDGET_TICKS[1:]]
    series = {
        "tau (tokens per target pass)": [(size, row["tau"]) for size, row in rows],
        "speedup": [(size, row["speedup"]) for size, row in rows],
    }
    title = "tau and speedup of the tiny pair by budget"
    return lines(scheme, title, series, x_label="budget (nodes per tree)", top=16, ticks=BUDGET_TICKS)


def smollm2_figures() -> dict[tuple[str, str], dict]:
    """Figures of the SmolLM2 run by benchmark and method."""
    found = json.loads((RESULTS / "smollm2" / "figures.json").read_text())["figures"]
    return {(one["dataset"], one["method"]): one for one in found}


def smollm2_speedup(scheme: Scheme) -> str:
    """Speedup of the SmolLM2 head and of prompt lookup on each benchmark, with intervals."""
    found, names = smollm2_figures(), {"head, budget 16": "head@16", "prompt lookup of transformers": "hf-lookup"}
    series = {name: [found[dataset, method]["speedup"] for dataset in DATASETS] for name, method in names.items()}
    intervals = {
        name: [tuple(found[dataset, method]["speedup_interval"]) for dataset in DATASETS] for name, method in names.items()
    }
    title = "Speedup over plain decoding, SmolLM2-135M on two CPU cores"
    return bars(scheme, title, DATASETS, series, top=2.5, intervals=intervals, mark=1.0)


def smollm2_budgets(scheme: Scheme) -> str:
    """tau and speedup of the SmolLM2 head by budget, means of the seven benchmarks."""
    found, sizes = smollm2_figures(), (8, 16, 32, 64)
    mean = lambda size, name: sum(found[one, f"head@{size}"][name] for one in DATASETS) / len(DATASETS)  # noqa: E731
    series = {
        "tau (tokens per target pass)": [(1, 1.0)] + [(size, mean(size, "tau")) for size in sizes],
        "speedup": [(1, 1.0)] + [(size, mean(size, "speedup")) for size in sizes],
    }
    title = "tau and speedup of the SmolLM2 head by budget, means of seven benchmarks"
    return lines(scheme, title, series, x_label="budget (nodes per tree)", top=4, ticks=BUDGET_TICKS[:5])


def smollm2_training(scheme: Scheme) -> str:
    """Accuracy of the SmolLM2 head while it was trained, both stages behind each other, means of 25 steps."""
    series: dict[str, list[tuple[float, float]]] = {f"depth {depth}": [] for depth in (1, 2, 3)}
    before = 0
    for file in ("metrics.jsonl", "correction/metrics.jsonl"):
        steps = [row for _, row in read_jsonl(RESULTS / "smollm2" / file) if "accuracy_by_depth" in row]
        for start in range(0, len(steps) - 24, 25):
            part = steps[start : start + 25]
            for depth, points in enumerate(series.values()):
                accuracy = sum(row["accuracy_by_depth"][depth] for row in part) / len(part)
                points.append(((before + part[-1]["tokens_seen"]) / 1e6, accuracy))
        before += steps[-1]["tokens_seen"]
    title = "Accuracy by depth against training tokens"
    ticks = (0, 0.5, 1.0, 1.5, 2.0, 2.5)
    return lines(scheme, title, series, x_label="million training tokens", top=0.8, ticks=ticks, dots=False)


def correction(scheme: Scheme) -> str:
    """tau of the SmolLM2 head at budget 32 with and without its correction."""
    series = {}
    for name, file in {"with correction": "bfloat16.jsonl", "without": "without-correction.jsonl"}.items():
        _, records = read_records(RESULTS / "smollm2" / file)
        kept = {dataset: [] for dataset in DATASETS}
        for one in records:
            if one["method"] == "head@32":
                kept[one["dataset"]] += one["kept"]
        series[name] = [sum(kept[dataset]) / len(kept[dataset]) for dataset in DATASETS]
    return bars(scheme, "tau at budget 32 with and without the correction", DATASETS, series, top=4)


def acceptance_rules(scheme: Scheme) -> str:
    """tau of three rules by temperature, laws by depth, noise 1."""
    cells = json.loads((RESULTS / "acceptance_rules.json").read_text())["cells"]
    chosen = [cell for cell in cells if not cell["conditional"] and cell["noise"] == 1.0]
    names = {"chain, block": "chain, block", "fixed tree, match": "best-first, match", "drawn, traversal": "drawn, traversal"}
    series = {name: [(cell["temperature"], cell["tau"][rule]) for cell in chosen] for name, rule in names.items()}
    title = "tau of three rules by temperature, budget 32"
    return lines(scheme, title, series, x_label="temperature", top=2.8, ticks=(0, 0.3, 0.6, 1.0))


FIGURES: dict[str, Callable[[Scheme], str]] = {
    "round": one_round,
    "tiny-budgets": tiny_budgets,
    "smollm2-speedup": smollm2_speedup,
    "smollm2-budgets": smollm2_budgets,
    "smollm2-training": smollm2_training,
    "correction": correction,
    "acceptance-rules": acceptance_rules,
}


def ablations() -> dict[str, Callable[[Scheme], str]]:
    """The charts that the ablations put into their results."""
    found: dict[str, Callable[[Scheme], str]] = {}
    for path in sorted((RESULTS / "ablations").glob("*.json")):
        for name, chart in json.loads(path.read_text())["charts"].items():
            found[f"ablation-{name.replace('_', '-')}"] = partial(lines, **chart)
    return found


def figures() -> dict[str, str]:
    """Every figure by file name."""
    drawn = FIGURES | ablations()
    return {f"{name}-{which}.svg": draw(scheme) for name, draw in drawn.items() for which, scheme in SCHEMES.items()}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures().items():
        (folder / name).write_text(svg)
    print(f"{len(figures()) // 2} figures of {WIDTH} pixels in {folder}")


if __name__ == "__main__":
    main()
