"""The command `verify`."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any


def add_verify_command(commands: Any) -> None:
    """Adds `verify` to the command line."""
    verify = commands.add_parser("verify", help="prove on your own models that the text stays the target's")
    verify.add_argument("--target", required=True, help="folder or hub name of the target")
    verify.add_argument("--head", required=True, help="folder or hub name of its draft head")
    verify.add_argument("--prompts-file", required=True, help="JSONL file or hub data set of prompts or conversations")
    verify.add_argument("--num-prompts", type=int, default=8, help="only the first so many (default 8)")
    verify.add_argument("--budget", type=int, default=16, help="nodes per tree, root included (default 16)")
    verify.add_argument("--max-new-tokens", type=int, default=64)
    verify.add_argument("--rounds", type=int, default=50_000, help="simulated rounds per test of a law (default 50000)")
    verify.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="default: float32")
    verify.add_argument("--device", default="cpu")
    verify.add_argument("--out", help="where the certificate goes (JSON); the terminal when absent")
    verify.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    import torch

    from jetflow.certificate import certificate
    from jetflow.chat import chat_ids
    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.heads.checkpoint import load_head
    from jetflow.targets import Target
    from jetflow.training.data import read_conversations, user_turns

    for name in ("num_prompts", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    dtype = getattr(torch, args.dtype)
    target = Target.from_pretrained(args.target, dtype=dtype, device=args.device)
    head = load_head(args.head, dtype=dtype, device=args.device)
    if not isinstance(head, BlockDraftHead):
        raise ValueError(f"--head {args.head} is an EAGLE-3 head; verify tests JetFlow and DFlash heads")
    prompts = []
    for one in islice(read_conversations(args.prompts_file), args.num_prompts):
        turns = user_turns(one.messages)[0]
        prompts.append(chat_ids(target.tokenizer, turns, plain_text=True))
    if not prompts:
        raise ValueError(f"{args.prompts_file} holds no prompts")
    names = {"target": Path(args.target).name, "head": Path(args.head).name}
    found = certificate(
        head, target, prompts, budget=args.budget, max_new_tokens=args.max_new_tokens, num_rounds=args.rounds, names=names
    )
    text = json.dumps(found, indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n")
    else:
        print(text)
    greedy, tests = found["greedy"], found["laws"]["tests"]
    failed = [one for one in tests if one["p_value"] <= found["laws"]["level"]]
    unexplained = sum(not one["explained"] for one in greedy["divergences"])
    print(
        f"{greedy['equal']} of {greedy['texts']} texts equal ({unexplained} divergences unexplained), "
        f"{len(tests) - len(failed)} of {len(tests)} laws held: {'passed' if found['passed'] else 'FAILED'}",
        file=sys.stderr,
    )
    return 0 if found["passed"] else 1
