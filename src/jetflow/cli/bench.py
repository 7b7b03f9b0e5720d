"""The command `bench`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetflow.cli.bench_checks import DRAFT_METHODS, HEAD_METHODS, METHODS, check_bench_options

if TYPE_CHECKING:
    from jetflow.benchmark.methods import Method
    from jetflow.protocols import Drafter
    from jetflow.targets import Target

DEFAULT_BUDGET = 16
# Children of a popped node in the published trees.
PUBLISHED_WIDTH = 7


def add_bench_command(commands: Any) -> None:
    """Adds `bench` to the command line."""
    bench = commands.add_parser("bench", help="measure methods against each other on benchmarks, or draw what was measured")
    bench.add_argument("--from", dest="sources", nargs="+", help="results files: draw them again, without a model")
    bench.add_argument("--target", help="folder or hub name of the target")
    bench.add_argument(
        "--head",
        nargs="+",
        help="folder or hub name of its draft head; several are named NAME in METHOD:NAME; method eagle needs an EAGLE-3 head",
    )
    bench.add_argument("--draft", help="folder or hub name of a small model with the same tokenizer")
    bench.add_argument("--data", nargs="+", help="JSONL files or names of benchmarks on the hub")
    bench.add_argument("--count", type=int, default=16, help="rows of each (default 16)")
    bench.add_argument("--skip", type=int, default=0, help="rows to leave out in front, such as those a head was tuned on")
    bench.add_argument(
        "--templates", choices=["none", "published"], default="none", help="put prompts into published templates"
    )
    bench.add_argument("--methods", nargs="+", choices=METHODS, default=["plain", "head"])
    bench.add_argument("--budgets", type=int, nargs="+", help="nodes per tree, root included (default 16)")
    bench.add_argument(
        "--acceptance", type=float, nargs="+", help="with simulated: rates at which a depth's first candidate is accepted"
    )
    bench.add_argument("--frequent-tokens", type=int, help="draft only so many tokens, the head's most frequent ones")
    bench.add_argument("--passes", type=int, default=1, help="of the head per tree; more than one needs refinement")
    bench.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    bench.add_argument("--max-new-tokens", type=int, default=128)
    bench.add_argument("--batch-size", type=int, default=1, help="prompts of a benchmark that are continued together")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that of the checkpoint")
    bench.add_argument("--device", default="cpu")
    bench.add_argument("--out", help="JSONL file of the records; a run that was stopped there goes on")
    bench.add_argument("--plots", help="folder for the plots")
    bench.add_argument("--accuracy", action="store_true", help="also count right answers, where the data has references")
    bench.add_argument(
        "--run-code", action="store_true", help="with --accuracy: run the programs that were written, with limits"
    )
    bench.add_argument("--published", nargs="+", default=[], help="published figures to draw as lines, such as 'JetSpec 64'")
    bench.add_argument("--markdown", help="file for the table")
    bench.add_argument("--figures", help="JSON file for the figures")
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console

    from jetflow.benchmark.plots import draw, published
    from jetflow.benchmark.tables import accuracies, console_table, figures_of, markdown, read_results

    check_bench_options(args)
    if args.sources is None:
        _measure(args)
        args.sources = [args.out]
    settings, records = read_results([Path(one) for one in args.sources])
    figures = figures_of(settings, records)
    Console().print(console_table(figures))
    if args.accuracy:
        for (dataset, method), (right, answered) in accuracies(records, run_code=args.run_code).items():
            print(f"{dataset}, {method}: {right} of {answered} right")
    if args.markdown:
        Path(args.markdown).write_text(markdown(figures) + "\n")
    if args.figures:
        content = {"settings": settings, "figures": [asdict(one) for one in figures]}
        Path(args.figures).write_text(json.dumps(content, indent=1) + "\n")
    if args.plots:
        references = {name: published(name, settings["temperature"]) for name in args.published}
        for path in draw(figures, Path(args.plots), references):
            print(path, file=sys.stderr)
    return 0


def _measure(args: argparse.Namespace) -> None:
    import platform
    from importlib.metadata import version

    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from jetflow.benchmark.datasets import read_dataset
    from jetflow.benchmark.runner import run_benchmark
    from jetflow.benchmark.tables import refuse_mixture
    from jetflow.heads.files import weights_sha256
    from jetflow.targets import Target
    from jetflow.training.regenerate import target_fingerprint

    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = Target.from_pretrained(args.target, dtype=dtype, device=args.device)
    if target.tokenizer is None:
        raise ValueError(f"--target {args.target} has no tokenizer files, which text prompts need")
    methods = _methods(args, target)
    refuse_mixture(methods)
    datasets = [
        read_dataset(one, count=args.count, skip=args.skip, published_templates=args.templates == "published")
        for one in args.data
    ]
    settings = {
        "target": Path(args.target).name,
        "fingerprint": target_fingerprint(target),
        "head": ", ".join(_head_names(args)) or None,
        "head_fingerprints": {
            name: weights_sha256(folder) for name, folder in zip(_head_names(args), args.head or (), strict=True)
        },
        "draft": Path(args.draft).name if args.draft else None,
        "methods": list(methods),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": _device_name(target),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "temperature": args.temperature,
        "templates": args.templates,
        "frequent_tokens": args.frequent_tokens,
        "passes": args.passes,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "versions": {name: version(name) for name in ("jetflow", "torch", "transformers")},
    }
    if args.batch_size > 1:
        settings["batch_size"] = args.batch_size
    if args.acceptance:
        settings["simulated_acceptance"] = args.acceptance
    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("texts", total=None)
        run_benchmark(
            target, methods, datasets, Path(args.out), settings=settings, max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size, seed=args.seed,
            on_record=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip


def _methods(args: argparse.Namespace, target: Target) -> dict[str, Method]:
    """The chosen methods by name, plain decoding first; trees as NAME@BUDGET."""
    from jetflow.acceptors import SamplingAcceptor
    from jetflow.benchmark.methods import DecoderMethod, HuggingFaceMethod
    from jetflow.decoding import SpeculativeDecoder
    from jetflow.drafters.draft_model import DraftModelDrafter
    from jetflow.drafters.prompt_lookup import PromptLookupDrafter
    from jetflow.targets import Target as AnyTarget

    acceptor = SamplingAcceptor(args.temperature)
    found: dict[str, Method] = {"plain": DecoderMethod(SpeculativeDecoder(target, PromptLookupDrafter(), acceptor, 1))}
    if "simulated" in args.methods:
        found |= _simulated(args, target)
    drafters: dict[str, Any] = {}
    if set(HEAD_METHODS) & set(args.methods):
        drafters |= _head_drafters(args, target)
    drafters["lookup"] = PromptLookupDrafter()
    small = None
    if set(DRAFT_METHODS) & set(args.methods):
        small = AnyTarget.from_pretrained(args.draft, dtype=target.dtype, device=args.device)
        drafters["draft"] = DraftModelDrafter(small, target)
    for method in args.methods:
        for name in [name for name in drafters if name.split(":")[0] == method]:
            for budget in args.budgets or [DEFAULT_BUDGET]:
                found[f"{name}@{budget}"] = DecoderMethod(SpeculativeDecoder(target, drafters[name], acceptor, budget))
    peers: dict[str, dict[str, Any]] = {
        "hf": {},
        "hf-lookup": {"prompt_lookup_num_tokens": 10},
        "hf-assisted": {"assistant_model": small and small.model},
    }
    for name, options in peers.items():
        if name in args.methods:
            found[name] = HuggingFaceMethod(target, args.temperature, options)
    return found


def _head_drafters(args: argparse.Namespace, target: Target) -> dict[str, Drafter]:
    """The drafters of every head, by method, and by METHOD:NAME where there are several heads."""
    from jetflow.drafters.head import head_drafter
    from jetflow.drafters.merged import MergedDrafter
    from jetflow.drafters.prompt_lookup import PromptLookupDrafter
    from jetflow.heads.checkpoint import load_frequent_tokens, load_head
    from jetflow.heads.eagle_head import EagleHead
    from jetflow.trees.expanders import Chain, FanoutBestFirst

    names = _head_names(args)
    heads = [load_head(folder, dtype=target.dtype, device=args.device) for folder in args.head]
    _check_heads(args, [isinstance(head, EagleHead) for head in heads])
    found: dict[str, Drafter] = {}
    for folder, name, head in zip(args.head, names, heads, strict=True):
        end = f":{name}" if len(args.head) > 1 else ""
        vocabulary = None if args.frequent_tokens is None else load_frequent_tokens(folder, args.frequent_tokens)
        best = head_drafter(head, target, vocabulary=vocabulary, passes=args.passes)
        if isinstance(head, EagleHead):
            found[f"eagle{end}"] = best
            continue
        found[f"head{end}"] = best
        for method, expander in (("head-chain", Chain()), ("head-fanout", FanoutBestFirst(PUBLISHED_WIDTH))):
            if method in args.methods:
                found[f"{method}{end}"] = head_drafter(head, target, expander, vocabulary=vocabulary, passes=args.passes)
        # Methods take turns, and a drafter forgets at the start of each text, so that one serves both.
        found[f"merged{end}"] = MergedDrafter([best, PromptLookupDrafter()], [0.7, 0.3])
    return found


def _check_heads(args: argparse.Namespace, are_eagle: list[bool]) -> None:
    """Every method needs a head of its kind, and every head a method."""
    wanted = [name for name in args.methods if name in HEAD_METHODS]
    for method in wanted:
        if (method == "eagle") not in are_eagle:
            kind = "an EAGLE-3 head" if method == "eagle" else "a JetFlow or DFlash head"
            raise ValueError(f"--methods {method} needs {kind} among --head {' '.join(args.head)}")
    for folder, is_eagle in zip(args.head, are_eagle, strict=True):
        if is_eagle and args.frequent_tokens is not None:
            raise ValueError(
                f"--frequent-tokens is for JetFlow and DFlash heads; {folder} is an EAGLE-3 head, which has its own"
            )
        if is_eagle not in [method == "eagle" for method in wanted]:
            raise ValueError(f"--head {folder} is read by none of --methods {' '.join(args.methods)}")


def _head_names(args: argparse.Namespace) -> list[str]:
    names = [Path(one).name for one in args.head or ()]
    if len(set(names)) < len(names) or (len(names) > 1 and any(set(":@") & set(name) for name in names)):
        raise ValueError(f"several --head need folders of different names without ':' and '@', got {', '.join(names)}")
    return names


def _simulated(args: argparse.Namespace, target: Target) -> dict[str, Method]:
    """Simulated methods, as simulated:RATE@BUDGET; the head they cost has the sizes of `--head` where there is one."""
    from jetflow.benchmark.simulated import SimulatedDrafter, SimulatedMethod, TrueText, simulated_config
    from jetflow.decoding import SpeculativeDecoder
    from jetflow.heads.checkpoint import load_config

    config = load_config(args.head[0]) if args.head else simulated_config(target)
    truth = TrueText(target)
    found: dict[str, Method] = {}
    for rate in args.acceptance:
        drafter = SimulatedDrafter(target, config, truth, rate, args.seed)
        for budget in args.budgets or [DEFAULT_BUDGET]:
            decoder = SpeculativeDecoder(target, drafter, budget=budget)
            found[f"simulated:{rate:g}@{budget}"] = SimulatedMethod(decoder, truth)
    return found


def _device_name(target: Target) -> str:
    import torch

    return torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
