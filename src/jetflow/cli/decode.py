"""The commands `demo`, `generate` and `inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetflow.decoding import SpeculativeDecoder
    from jetflow.protocols import Drafter, TreeExpander
    from jetflow.results import GenerationResult
    from jetflow.targets import Target


def add_decode_commands(commands: Any) -> None:
    """Adds `demo`, `generate` and `inspect` to the command line."""
    demo = commands.add_parser("demo", help="stream a few prompts three ways and compare text and speed")
    demo.add_argument("--models", default="models/tiny", help="folder with target/, head/ and heldout.jsonl")
    demo.add_argument("--prompts", type=int, default=6, help="how many prompts (default 6)")
    demo.add_argument("--budget", type=int, default=16, help="nodes per tree, root included (default 16)")
    demo.add_argument("--max-new-tokens", type=int, default=160)
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="continue prompts")
    _add_model_arguments(generate)
    generate.add_argument("--prompts-file", help="JSONL file or hub data set of prompts or conversations")
    generate.add_argument("--num-prompts", type=int, help="only the first so many lines of the file")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument(
        "--rule", choices=["match", "recursive", "traversal"], default="match",
        help="how children are accepted at a temperature above 0; all but match draw the tree's children from the head's law",
    )  # fmt: skip
    generate.add_argument("--seed", type=int)
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt instead of streamed text")
    generate.add_argument("--batch-size", type=int, default=1, help="prompts that are continued together; needs --json")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser("inspect", help="draw the tree of one round")
    _add_model_arguments(inspect)
    inspect.add_argument("--round", type=int, default=0, help="which round (default 0)")
    inspect.set_defaults(run=_inspect)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder or hub name of the target")
    parser.add_argument("--head", help="folder or hub name of its draft head")
    parser.add_argument("--drafter", choices=["lookup", "none"], help="a drafter that needs no head")
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    parser.add_argument("--budget", type=int, default=16, help="nodes per tree, root included (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--expander", choices=["best-first", "fanout", "beam", "chain"], default="best-first")
    parser.add_argument("--width", type=int, help="children per node (fanout) or nodes per level (beam)")
    parser.add_argument("--frequent-tokens", type=int, help="draft only so many tokens, the head's most frequent ones")
    parser.add_argument("--passes", type=int, default=1, help="of the head per tree; more than one needs refinement")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that of the checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="sdpa", help="transformers' attention for the prompt, or triton for tree passes")


def _demo(args: argparse.Namespace) -> int:
    from jetflow.demo import run_demo

    return run_demo(Path(args.models), num_prompts=args.prompts, budget=args.budget, max_new_tokens=args.max_new_tokens)


def _generate(args: argparse.Namespace) -> int:
    from transformers import TextStreamer

    from jetflow.acceptors import RecursiveRejection, SamplingAcceptor, TraversalVerification

    if args.temperature == 0 and (args.top_k is not None or args.top_p is not None):
        raise ValueError("--top-k and --top-p choose what is drawn from; give a --temperature above 0 with them")
    if args.rule != "match" and (args.temperature == 0 or args.head is None or args.expander != "best-first"):
        raise ValueError(
            f"--rule {args.rule} draws trees from a head: it needs --head, a --temperature above 0 and no --expander"
        )
    if args.batch_size < 1 or (args.batch_size > 1 and not args.json):
        raise ValueError(f"--batch-size must be at least 1, and above 1 it needs --json, got {args.batch_size}")
    rules: dict[str, Any] = {"match": SamplingAcceptor, "recursive": RecursiveRejection, "traversal": TraversalVerification}
    acceptor = rules[args.rule](args.temperature, top_k=args.top_k, top_p=args.top_p)
    target = _load_target(args)
    decoder = _decoder(args, target, acceptor)
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
    prompts = _prompts(args, target)
    if args.json:
        for start in range(0, len(prompts), args.batch_size):
            batch = prompts[start : start + args.batch_size]
            for result in decoder.generate(batch, batch_size=args.batch_size, **settings):
                _print_json(result)
        return 0
    for prompt in prompts:
        streamer = TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
        result = decoder.generate(prompt, streamer=streamer, **settings)
        tau = "no rounds" if result.tau is None else f"tau {result.tau:.2f}"
        rate = f"{result.tokens_per_second:.1f} tokens/s"
        print(f"[{len(result.token_ids)} tokens, {tau}, {rate}, {result.finish_reason}]", file=sys.stderr)
    return 0


def _print_json(result: GenerationResult) -> None:
    record = {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tau": result.tau,
        "tokens_per_second": result.tokens_per_second,
    }
    print(json.dumps(record), flush=True)


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from jetflow.trees.drawing import draw_tree

    target = _load_target(args)
    decoder = _decoder(args, target)
    events: list[Any] = []
    decoder.generate(next(iter(_prompts(args, target))), max_new_tokens=args.max_new_tokens, on_round=events.append)
    if not 0 <= args.round < len(events):
        raise ValueError(f"--round {args.round} must be in [0, {len(events)}), the rounds of this text")
    event = events[args.round]
    Console().print(draw_tree(event.tree, decode=_token_text(target), acceptance=event.acceptance))
    print(f"round {args.round}: {event.tree.max_nodes} nodes, {event.stats.num_accepted} accepted, and the bonus token")
    return 0


def _token_text(target: Target) -> Callable[[int], str]:
    if target.tokenizer is None:
        return str
    return lambda token: target.tokenizer.decode([token])


def _load_target(args: argparse.Namespace) -> Target:
    import torch

    from jetflow.targets import Target

    file = getattr(args, "prompts_file", None)
    if args.prompt is None and file is None:
        raise ValueError("give a text with --prompt (generate also takes --prompts-file)")
    if args.prompt is not None and file is not None:
        raise ValueError("--prompt and --prompts-file exclude each other")
    if file is None and getattr(args, "num_prompts", None) is not None:
        raise ValueError(f"--num-prompts {args.num_prompts} belongs to --prompts-file")
    if args.head is None and args.drafter is None:
        raise ValueError("give a draft head with --head, or --drafter lookup, or --drafter none for plain decoding")
    if args.head is not None and args.drafter is not None:
        raise ValueError("--head and --drafter exclude each other")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch finds no CUDA device here")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = Target.from_pretrained(args.target, dtype=dtype, device=args.device, attention=args.attention)
    if target.tokenizer is None:
        raise ValueError(f"--target {args.target} has no tokenizer files, which text prompts need")
    return target


def _decoder(args: argparse.Namespace, target: Target, acceptor: Any = None) -> SpeculativeDecoder:
    from jetflow.decoding import SpeculativeDecoder

    budget = 1 if args.drafter == "none" else args.budget
    return SpeculativeDecoder(target, _drafter(args, target), acceptor, budget)


def _drafter(args: argparse.Namespace, target: Target) -> Drafter:
    from jetflow.drafters.head import head_drafter
    from jetflow.drafters.prompt_lookup import PromptLookupDrafter
    from jetflow.heads.checkpoint import load_frequent_tokens, load_head
    from jetflow.scoring.acceptance_table import AcceptanceTable
    from jetflow.trees.expanders import BestFirst
    from jetflow.trees.sampling import ChildSampling

    if args.head is None:
        given = args.expander != "best-first" or args.width is not None or args.frequent_tokens is not None
        if given or args.passes != 1:
            raise ValueError(
                "--expander, --width, --frequent-tokens and --passes are for heads; prompt lookup builds its own tree"
            )
        return PromptLookupDrafter()
    head = load_head(args.head, dtype=target.dtype, device=args.device)
    vocabulary = None if args.frequent_tokens is None else load_frequent_tokens(args.head, args.frequent_tokens)
    options: dict[str, Any] = {"vocabulary": vocabulary, "passes": args.passes}
    if getattr(args, "rule", "match") == "match":
        return head_drafter(head, target, _expander(args), **options)
    # The draft's law at the target's temperature, slots chosen without a look at what was drawn into them.
    sampling = ChildSampling(args.temperature)
    return head_drafter(head, target, BestFirst(AcceptanceTable()), sampling=sampling, **options)


def _expander(args: argparse.Namespace) -> TreeExpander:
    from jetflow.trees.expanders import Beam, BestFirst, Chain, FanoutBestFirst

    if args.expander in ("fanout", "beam"):
        if args.width is None:
            raise ValueError(f"--expander {args.expander} needs --width")
        return (FanoutBestFirst if args.expander == "fanout" else Beam)(args.width)
    if args.width is not None:
        raise ValueError(f"--width belongs to the expanders fanout and beam, not to {args.expander}")
    return BestFirst() if args.expander == "best-first" else Chain()


def _prompts(args: argparse.Namespace, target: Target) -> list[list[int]]:
    file = getattr(args, "prompts_file", None)
    texts = [args.prompt] if file is None else _texts_of(file, args.num_prompts)
    if not args.chat:
        return [target.tokenizer(text).input_ids for text in texts]
    return [target.chat_ids(text) for text in texts]


def _texts_of(file: str, num_prompts: int | None) -> list[str]:
    """Returns the first user turns of the first `num_prompts` conversations of a file (all when None)."""
    from jetflow.training.data import read_conversations, user_turns

    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {num_prompts}")
    texts = [user_turns(one.messages)[0][-1]["content"] for one in islice(read_conversations(file), num_prompts)]
    if not texts:
        raise ValueError(f"{file} holds no prompts")
    return texts
