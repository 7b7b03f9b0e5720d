"""The command `regenerate`."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

# Prompts that run together, or requests that are under way.
AT_A_TIME = 32


def add_regenerate_command(commands: Any) -> None:
    """Adds `regenerate` to the command line."""
    regenerate = commands.add_parser("regenerate", help="let the target answer prompts: the data that heads learn from")
    regenerate.add_argument("--target", required=True, help="folder or hub name of the target")
    regenerate.add_argument("--prompts", required=True, nargs="+", help="JSONL files or hub data sets")
    regenerate.add_argument("--out", required=True, help="JSONL file; a run that was killed goes on where it was")
    regenerate.add_argument("--num-prompts", type=int, help="only the first so many of each file")
    regenerate.add_argument("--max-new-tokens", type=int, default=512)
    regenerate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    regenerate.add_argument("--top-k", type=int)
    regenerate.add_argument("--top-p", type=float)
    regenerate.add_argument("--samples", type=int, default=1, help="answers to each prompt")
    regenerate.add_argument("--seed", type=int, default=0)
    regenerate.add_argument("--thinking", choices=["on", "off"], help="handed to the chat template as enable_thinking")
    regenerate.add_argument("--batch-size", type=int, help="prompts that run together in this process (default 32)")
    regenerate.add_argument("--max-prompt-tokens", type=int, help="longer prompts are left out")
    regenerate.add_argument("--endpoint", help="address of an OpenAI-compatible server that answers instead")
    regenerate.add_argument("--model", help="name of the model at the endpoint")
    regenerate.add_argument("--concurrency", type=int, help="requests to the endpoint at a time (default 32)")
    regenerate.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that of the checkpoint")
    regenerate.add_argument("--device", help="default: cpu")
    regenerate.set_defaults(run=_regenerate)


def _regenerate(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from jetflow.training.data import Conversation, read_conversations
    from jetflow.training.regenerate import RegenerationSettings, regenerate

    if (args.endpoint is None) != (args.model is None):
        raise ValueError("--endpoint and --model belong together")
    # An endpoint has its own device and batches; this process makes no requests.
    for name in ("concurrency",) if args.endpoint is None else ("batch_size", "max_prompt_tokens", "dtype", "device"):
        if getattr(args, name) is not None:
            where = "an --endpoint" if args.endpoint is None else "a target in this process, without --endpoint"
            raise ValueError(f"--{name.replace('_', '-')}={getattr(args, name)} is for {where}")
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    settings = RegenerationSettings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        num_samples=args.samples,
        seed=args.seed,
        template_args={} if args.thinking is None else {"enable_thinking": args.thinking == "on"},
    )
    conversations: list[Conversation] = []
    for source in args.prompts:
        conversations += islice(read_conversations(source), args.num_prompts)
    answer, fingerprint = _answerer(args, settings)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("answers", total=None)
        report = regenerate(
            conversations, answer, Path(args.out), settings=settings, fingerprint=fingerprint,
            on_answer=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    left_out = f", {report.num_left_out} prompts left out as too long" if report.num_left_out else ""
    print(f"{args.out}: {report.num_written} answers written, {report.num_found} found from before{left_out}", file=sys.stderr)
    return 0


def _answerer(args: argparse.Namespace, settings: Any) -> tuple[Any, str]:
    """Returns what answers, and the name of the target that goes into the file."""
    if args.endpoint is not None:
        from transformers import AutoTokenizer

        from jetflow.training.endpoint import EndpointAnswerer

        tokenizer = AutoTokenizer.from_pretrained(args.target)
        concurrency = AT_A_TIME if args.concurrency is None else args.concurrency
        answer = EndpointAnswerer(args.endpoint, args.model, tokenizer, settings, concurrency=concurrency)
        return answer, f"served:{args.model}"
    import torch

    from jetflow.targets import Target
    from jetflow.training.answering import TargetAnswerer
    from jetflow.training.regenerate import target_fingerprint

    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = Target.from_pretrained(args.target, dtype=dtype, device=args.device or "cpu")
    batch_size = AT_A_TIME if args.batch_size is None else args.batch_size
    answerer = TargetAnswerer(target, settings, batch_size=batch_size, max_prompt_tokens=args.max_prompt_tokens)
    return answerer, target_fingerprint(target)
