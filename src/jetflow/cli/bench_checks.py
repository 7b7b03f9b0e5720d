"""What `jetflow bench` refuses before it loads anything: options that are missing, or that nothing of the run reads."""

from __future__ import annotations

import argparse

HEAD_METHODS = ("head", "head-chain", "head-fanout", "eagle", "merged")
DRAFT_METHODS = ("draft", "hf-assisted")
# Methods that write one text at a time.
SINGLE_METHODS = (*DRAFT_METHODS, "simulated", "hf-lookup")
TREE_METHODS = (*HEAD_METHODS, "lookup", "draft", "simulated")
METHODS = ("plain", *TREE_METHODS, "hf", "hf-lookup", "hf-assisted")
# Options that have no value unless they are given, and belong to measuring.
MEASURING = ("target", "head", "draft", "data", "budgets", "acceptance", "frequent_tokens", "dtype", "out")
# What an option belongs to.
OWNERS = {
    "head": (*HEAD_METHODS, "simulated"),
    "draft": DRAFT_METHODS,
    "budgets": TREE_METHODS,
    "frequent_tokens": HEAD_METHODS,
    "passes": HEAD_METHODS,
    "acceptance": ("simulated",),
}


def check_bench_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that are missing, out of range, or read by nothing."""
    if args.run_code and not args.accuracy:
        raise ValueError("--run-code belongs to --accuracy")
    if args.published and args.plots is None:
        raise ValueError(f"--published {' '.join(args.published)} draws lines into --plots, which is absent")
    if args.sources is not None:
        given = [name for name in MEASURING if getattr(args, name) is not None]
        if given:
            raise ValueError(f"{_option(given[0])} is for measuring; --from draws what was measured")
        return
    for name in ("target", "data", "out"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is needed to measure (or --from to draw what was measured)")
    if min(args.count, args.max_new_tokens, args.batch_size, *(args.budgets or [1])) < 1 or args.skip < 0:
        raise ValueError("--count, --max-new-tokens, --batch-size and --budgets must be at least 1, --skip at least 0")
    _check_methods(args)


def _check_methods(args: argparse.Namespace) -> None:
    chosen = " ".join(args.methods)
    for name, owners in OWNERS.items():
        given = args.passes != 1 if name == "passes" else getattr(args, name) is not None
        if given and not set(owners) & set(args.methods):
            raise ValueError(f"{_option(name)} belongs to the methods {', '.join(owners)}; got --methods {chosen}")
    wanted = [name for name in args.methods if name in HEAD_METHODS]
    if wanted and args.head is None:
        raise ValueError(f"--methods {', '.join(wanted)} need --head")
    if args.draft is None and set(DRAFT_METHODS) & set(args.methods):
        raise ValueError("--methods draft and hf-assisted need --draft")
    for name in args.methods if args.batch_size > 1 else ():
        if name in SINGLE_METHODS:
            raise ValueError(f"--methods {name} writes one text at a time and needs --batch-size 1, got {args.batch_size}")
    if "simulated" not in args.methods:
        return
    if not args.acceptance:
        raise ValueError("--methods simulated needs --acceptance")
    if args.temperature:
        raise ValueError(f"--methods simulated needs --temperature 0, got {args.temperature}")
    if args.head and len(args.head) > 1:
        raise ValueError(f"--methods simulated takes the sizes of one --head, got {len(args.head)}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
