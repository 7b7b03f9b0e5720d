"""The options of the ablation scripts, and the laboratory that they make."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from lab import ROOT, Lab


def arguments(doc: str | None, **lists: tuple[float, ...]) -> argparse.Namespace:
    """The options that all ablations have, and one for each list of values that is named."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", action="store_true", help="toy sizes, to see that everything runs")
    sizes.add_argument("--quick", action="store_true", help="minutes: one seed of heads of 100 steps, always trained anew")
    parser.add_argument("--target", default=str(ROOT / "models/tiny/target"), help="folder or hub name")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` (and `answer`, for corpus data) to train on")
    parser.add_argument("--heldout", type=Path, help="JSONL with `prompt` to measure on")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, help="3; 1 with --quick or --smoke")
    parser.add_argument("--num-layers", type=int, help="of the heads; 2 for the tiny target, 5 for others")
    parser.add_argument("--steps", type=int, help="300; 100 with --quick, 2 with --smoke")
    parser.add_argument("--workers", type=int, help="heads that train side by side, one thread each: 2; 1 with --smoke")
    parser.add_argument("--work-dir", type=Path, help="what has been computed; runs/lab, or runs/lab-smoke, when absent")
    parser.add_argument("--out", type=Path, help="folder of the results; results/ablations, or nowhere for --quick and --smoke")
    for name, values in lists.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, nargs="+", default=list(values))
    args = parser.parse_args()
    if (args.prompts is None) != (args.heldout is None):
        parser.error("--prompts and --heldout belong together")
    if args.quick and args.work_dir:
        parser.error("--quick trains anew in runs/lab-quick and takes no --work-dir")
    return args


def make_lab(args: argparse.Namespace) -> Lab:
    """The laboratory that the options ask for."""
    size = "quick" if args.quick else "smoke" if args.smoke else None
    defaults = {None: (3, 300, 2), "quick": (1, 100, 2), "smoke": (1, 2, 1)}[size]
    for name, value in zip(("seeds", "steps", "workers"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    work = args.work_dir or ROOT / "runs" / (f"lab-{size}" if size else "lab")
    lab = Lab(args.target, work, args.prompts, args.heldout, args.dtype, args.device, args.steps)
    if args.prompts is not None:
        lab = replace(lab, num_layers=5, num_anchors=64, max_new_tokens=1024, taps=None)
    if args.num_layers is not None:
        lab = replace(lab, num_layers=args.num_layers)
    if args.smoke:
        # Toy sizes gain nothing from threads, and stall on them where cores are shared.
        torch.set_num_threads(1)
        lab = replace(lab, num_answers=32, num_heldout=3, max_new_tokens=24)
    if args.quick:
        lab = replace(lab, num_answers=1000, num_heldout=20)
        # Whoever has changed a line of a loss or of a mask wants no head of before.
        for head in work.glob("head-*"):
            shutil.rmtree(head)
    return lab
