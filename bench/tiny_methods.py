"""Question: which method drafts best for the tiny target when all of them are trained alike, and which is fastest?

    python -m bench.tiny_methods [--seeds 3] [--steps 300] [--write-readme]        (part of make bench-tiny)
    python -m bench.tiny_methods --pairwise

Equal data (the target's own greedy answers), steps, batches and nearly equal parameters; tau over three seeds along the
target's own texts, with 95 % intervals over seeds and prompts; then the speed of the first seed's heads, methods taking turns
in one process, texts compared. Writes results/tiny_methods.json, and .md for the docs; --write-readme replaces the table in
README.md, too. --pairwise compares the JetFlow head with one that has a correction, and both with heads of twice the steps, and
writes results/tiny_pairwise.json and .md. Heads that exist in runs/lab are not trained again; training the nine of the first
table takes about 6 minutes on two CPU cores.
"""

import argparse
import dataclasses
import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "ablations"))

from bench.tiny import between_marks
from lab import ROOT, HeadSpec, Lab, Variant
from report import Taus, figures

from jetflow.benchmark.compare import compare
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.eagle import EagleDrafter
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.trees.expanders import Chain

README, RESULTS = ROOT / "README.md", ROOT / "results"
BUDGETS, CHAIN = (8, 16, 32, 64, 128), 16
# Those at which any method here is quickest.
TIMED = (16, 32, 64)
# DFlash with the position weights of its authors for blocks of 16.
DFLASH = HeadSpec(causal=False, decay_rate=7.0)


def chain(head, target):
    return ParallelDrafter(head, target, Chain())


JETFLOW = Variant("JetFlow", HeadSpec(), BUDGETS)
METHODS = [
    Variant("DFlash, chain", DFLASH, (CHAIN,), build=chain),
    Variant("DFlash-T", DFLASH, BUDGETS),
    JETFLOW,
    # Last, as it trains quickest: so two workers end together.
    Variant("EAGLE-3", HeadSpec(kind="eagle3"), BUDGETS, build=EagleDrafter),
]
# With a correction by the token before, and both of twice the age.
PAIRWISE = [
    JETFLOW,
    Variant("JetFlow, pairwise", HeadSpec(correction="gated"), BUDGETS),
    Variant("JetFlow, 600 steps", HeadSpec(steps=600), BUDGETS),
    Variant("JetFlow, pairwise, 600 steps", HeadSpec(correction="gated", steps=600), BUDGETS),
]


def speeds(lab: Lab, variants: list[Variant], num_prompts: int) -> list[dict]:
    """Tokens per second of every method and budget, against plain decoding."""
    lookup = PromptLookupDrafter()
    decoders = {
        "plain": SpeculativeDecoder(lab.target, lookup, budget=1),
        "prompt lookup": SpeculativeDecoder(lab.target, lookup, budget=8),
    }
    for one in variants:
        drafter = one.build(lab.head(one.spec, 0), lab.target)
        for budget in (budget for budget in one.budgets if budget in TIMED):
            decoders[f"{one.name}, budget {budget}"] = SpeculativeDecoder(lab.target, drafter, budget=budget)
    prompts = [text.token_ids[: text.num_prompt_tokens] for text in lab.texts(0.0)[:: max(1, lab.num_heldout // num_prompts)]]
    results = compare(decoders, prompts, max_new_tokens=lab.max_new_tokens)
    table = Table("method", "tau", "tokens/s", "speedup", "95 %", "texts equal")
    for one in results:
        low, high = one.speedup_interval
        equal = f"{one.texts_equal} of {one.num_prompts}"
        table.add_row(
            one.name, f"{one.tau:.2f}", f"{one.tokens_per_second:.0f}", f"{one.speedup:.2f}x", f"{low:.2f} to {high:.2f}", equal
        )
    Console().print(table)
    if any(one.texts_equal != one.num_prompts for one in results):
        sys.exit("texts differ from plain decoding; nothing was written")
    return [dataclasses.asdict(one) for one in results]


def markdown(report: dict) -> str:
    """The table of the docs: tau of every method and budget, and each method's best speedup."""
    head = ["method", *(f"tau at {budget}" for budget in BUDGETS), "tokens/s", "best speedup"]
    found = {(one["variant"], one["budget"]): one for one in report["tau"]}
    rows = [head, ["---"] * len(head)]
    for name in ["plain", "prompt lookup", *dict.fromkeys(one["variant"] for one in report["tau"])]:
        cells = []
        for one in (found.get((name, budget)) for budget in BUDGETS):
            cells.append("-" if one is None else f"{one['tau']:.2f} ({one['interval'][0]:.2f} to {one['interval'][1]:.2f})")
        mine = [one for one in report["speed"] if one["name"].rsplit(", budget", 1)[0] == name]
        best = max(mine, key=lambda one: one["speedup"])
        at = best["name"].removeprefix(name).replace(", budget", " at")
        low, high = best["speedup_interval"]
        speedup = f"{best['speedup']:.2f}x" + (f" ({low:.2f} to {high:.2f}){at}" if name != "plain" else "")
        rows.append([name, *cells, f"{best['tokens_per_second']:.0f}", speedup])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--write-readme", action="store_true")
    parser.add_argument("--pairwise", action="store_true")
    args = parser.parse_args()
    if args.pairwise and args.write_readme:
        parser.error("--write-readme is for the table of the methods, without --pairwise")
    lab = Lab(str(ROOT / "models/tiny/target"), ROOT / "runs" / "lab", steps=args.steps)
    variants, name = (PAIRWISE, "tiny_pairwise") if args.pairwise else (METHODS, "tiny_methods")
    taus = Taus(lab.run(variants, range(args.seeds), workers=2))
    table = Table(f"tau, {args.seeds} seeds", *map(str, BUDGETS))
    for one in variants:
        cells = []
        for budget in BUDGETS:
            if not taus.has(one.name, budget, 0.0):
                cells.append("-")
                continue
            low, high = taus.interval(one.name, budget)
            cells.append(f"{taus.tau(one.name, budget):.2f} ({low:.2f} to {high:.2f})")
        table.add_row(one.name, *cells)
    Console(width=140).print(table)
    report = {
        "command": " ".join(["python -m bench.tiny_methods", *sys.argv[1:]]),
        "settings": {"seeds": args.seeds, "steps": args.steps, "num_prompts": args.num_prompts},
        "parameters": {one.name: sum(p.numel() for p in lab.head(one.spec, 0).parameters()) for one in variants},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tau": figures(taus),
        "speed": speeds(lab, variants, args.num_prompts),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown(report))
    if args.write_readme:
        README.write_text(between_marks(README.read_text(), "methods", markdown(report).rstrip()))


if __name__ == "__main__":
    main()
