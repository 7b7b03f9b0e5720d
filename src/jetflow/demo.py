"""`jetflow demo`: a few prompts three ways, streamed with the accepted runs coloured, then a table of speed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jetflow.benchmark.compare import MethodResult, compare
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.head import head_drafter
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.heads.checkpoint import load_head
from jetflow.jsonl import read_jsonl
from jetflow.results import Round
from jetflow.targets import Target

# Accepted runs alternate between two colours, so that neighbours can be told apart; the target's own tokens are plain.
RUN_STYLES = ("black on green", "black on cyan")
PLAIN_STYLE = "default"


class RunPainter:
    """Collects one text as it is written, run by run: a streamer for the first token and a callback for rounds."""

    def __init__(self, tokenizer: Any, *, marks: bool):
        self._tokenizer = tokenizer
        self._marks = marks
        self._ids: list[int] = []
        self._num_puts = 0
        self._num_runs = 0
        self._shown = ""
        self.text = Text()

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt (not shown), then the first token; later tokens come with their round."""
        self._num_puts += 1
        if self._num_puts == 2:
            self._add(value.tolist(), PLAIN_STYLE)

    def end(self) -> None:
        """Nothing to do: the last round has been painted."""

    def on_round(self, event: Round) -> None:
        """Paints the accepted run, then the target's own token."""
        run, own = event.kept[: event.num_accepted], event.kept[event.num_accepted :]
        if run:
            self._add(run, RUN_STYLES[self._num_runs % len(RUN_STYLES)], bracketed=self._marks)
            self._num_runs += 1
        self._add(own, PLAIN_STYLE)

    def _add(self, token_ids: list[int], style: str, *, bracketed: bool = False) -> None:
        self._ids += token_ids
        written = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        # A character whose bytes are not all there yet waits for the next token.
        written = written.rstrip("\ufffd")
        piece = written[len(self._shown) :]
        self._shown = written
        if piece:
            self.text.append(f"[{piece}]" if bracketed else piece, style=style)


def run_demo(models: Path, *, num_prompts: int, budget: int, max_new_tokens: int) -> int:
    """Streams, compares and prints the table; returns 0 when all texts are equal, else 1.

    Raises:
        ValueError: the folder lacks the pair, or `num_prompts` is below 1.
    """
    if not (models / "heldout.jsonl").exists():
        raise ValueError(f"{models} holds no tiny pair; run this from the repository or pass --models")
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num_prompts}")
    target, decoders = tiny_decoders(models, [budget])
    lines = heldout_rows(models, num_prompts)
    prompts = [target.chat_ids(line["prompt"]) for line in lines]
    console = Console()
    runs = "on colour" if console.is_terminal else "in [brackets]"
    console.print(
        f"Runs {runs} were drafted and accepted; what stands between them is the target's own next token.", markup=False
    )
    for line, prompt in zip(lines, prompts, strict=True):
        console.rule(line["id"] if isinstance(line["id"], str) else f"prompt {line['id']}")
        console.print(Text(line["prompt"]), style="bold")
        _stream(console, target, decoders, prompt, max_new_tokens)
    console.rule("speed, measured without display, methods taking turns")
    results = compare(decoders, prompts, max_new_tokens=max_new_tokens, repeats=3)
    console.print(result_table(results))
    equal = all(result.texts_equal == result.num_prompts for result in results)
    console.print("All texts are equal, token by token." if equal else "TEXTS DIFFER: this is a bug, please report it.")
    return 0 if equal else 1


def heldout_rows(models: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Returns the first `count` held-out rows of the tiny pair, or all of them: `id`, and the text of a `prompt`."""
    return [row for _, row in islice(read_jsonl(models / "heldout.jsonl"), count)]


def tiny_decoders(models: Path, budgets: list[int]) -> tuple[Target, dict[str, SpeculativeDecoder]]:
    """Loads the tiny pair in float32; plain decoding comes first, then prompt lookup, then JetFlow at each budget."""
    target = Target.from_pretrained(str(models / "target"), dtype=torch.float32)
    lookup = PromptLookupDrafter()
    drafter = head_drafter(load_head(models / "head", dtype=torch.float32), target)
    decoders = {
        "autoregressive": SpeculativeDecoder(target, lookup, budget=1),
        "prompt lookup": SpeculativeDecoder(target, lookup, budget=8),
    }
    for budget in budgets:
        decoders[f"JetFlow, budget {budget}"] = SpeculativeDecoder(target, drafter, budget=budget)
    return target, decoders


def result_table(results: list[MethodResult]) -> Table:
    """Returns the table of a comparison."""
    table = Table("method", "tau", "tokens/s", "speedup", "texts equal")
    for result in results:
        equal = f"{result.texts_equal} of {result.num_prompts}"
        table.add_row(result.name, f"{result.tau:.2f}", f"{result.tokens_per_second:.0f}", f"{result.speedup:.2f}x", equal)
    return table


def _stream(
    console: Console,
    target: Target,
    decoders: Mapping[str, SpeculativeDecoder],
    prompt: list[int],
    max_new_tokens: int,
) -> None:
    """Writes one prompt's texts next to each other on a terminal, below each other elsewhere."""
    painters = {name: RunPainter(target.tokenizer, marks=not console.is_terminal) for name in decoders}
    if not console.is_terminal:
        for name, decoder in decoders.items():
            painter = painters[name]
            decoder.generate(prompt, max_new_tokens=max_new_tokens, streamer=painter, on_round=painter.on_round)
            console.print(Text(f"{name}: ").append_text(painter.text))
        return
    width = console.width // len(decoders) - 1
    panels = {name: Panel(painters[name].text, title=name, width=width) for name in decoders}
    with Live(Columns(list(panels.values())), console=console, refresh_per_second=20) as live:
        for name, decoder in decoders.items():
            painter = painters[name]

            def show(event: Round, painter: RunPainter = painter) -> None:
                painter.on_round(event)
                live.refresh()

            decoder.generate(prompt, max_new_tokens=max_new_tokens, streamer=painter, on_round=show)
