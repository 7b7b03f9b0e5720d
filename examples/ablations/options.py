"""The options of the ablation scripts, and the laboratory that they make."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from lab import ROOT, Lab


def arguments(doc: str | None, **lists: tuple[float, ...]) -> argparse.Namespace:
    """The options that all ablations have, and one for each list of values that is named."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--target", default=str(ROOT / "models/tiny/target"), help="folder or hub name")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` (and `answer`, for corpus data) to train on")
    parser.add_argument("--heldout", type=Path, help="JSONL with `prompt` to measure on")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-layers", type=int, help="of the heads; 2 for the tiny target, 5 for others")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2, help="heads that train side by side, one thread each")
    parser.add_argument("--work-dir", type=Path, help="what has been computed; runs/lab when absent")
    parser.add_argument("--out", type=Path, help="folder of the results; results/ablations, or nowhere for --smoke")
    for name, values in lists.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, nargs="+", default=list(values))
    args = parser.parse_args()
    if (args.prompts is None) != (args.heldout is None):
        parser.error("--prompts and --heldout belong together")
    return args


def make_lab(args: argparse.Namespace) -> Lab:
    """The laboratory that the options ask for."""
    work = args.work_dir or ROOT / "runs" / ("lab-smoke" if args.smoke else "lab")
    lab = Lab(args.target, work, args.prompts, args.heldout, args.dtype, args.device, args.steps)
    if args.prompts is not None:
        lab = replace(lab, num_layers=5, num_anchors=64, max_new_tokens=1024, taps=None)
    if args.num_layers is not None:
        lab = replace(lab, num_layers=args.num_layers)
    if args.smoke:
        args.seeds, args.workers = 1, 1
        lab = replace(lab, steps=2, num_answers=32, num_heldout=3, max_new_tokens=24)
    return lab
