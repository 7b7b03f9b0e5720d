"""What a training run shows and records: a live table on a terminal, plain lines elsewhere, JSON lines always."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jetflow.jsonl import read_jsonl
from jetflow.training.evaluation import TauReport
from jetflow.training.totals import StepReport

METRICS = "metrics.jsonl"
# Steps over which the displayed numbers are averaged.
WINDOW = 20


class TrainingLog:
    """Records each step and evaluation under `folder` and shows where the run stands.

    Args:
        folder: the run's folder; lines go to `metrics.jsonl`.
        num_steps: steps of the whole run.
        first_step: steps that an earlier run did; its later lines, which will be written again, are dropped.
        print_every: steps between lines where there is no terminal.
        tensorboard: also write TensorBoard's event files, which needs the tensorboard package.
        console: where to show; the standard error when absent.

    Raises:
        ValueError: `tensorboard` is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int,
        first_step: int = 0,
        print_every: int = 50,
        tensorboard: bool = False,
        console: Console | None = None,
    ):
        self._num_steps, self._print_every = num_steps, print_every
        self._console = console or Console(file=sys.stderr)
        self._recent: list[StepReport] = []
        self._taus: list[TauReport] = []
        self._begin, self._first_step, self._num_tokens = time.perf_counter(), first_step, 0
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        kept = [row for row in read_metrics(folder) if row["step"] <= first_step]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        self._num_tokens = sum(row.get("num_tokens", 0) for row in kept)
        self._writer = _tensorboard(folder) if tensorboard else None
        self._live = Live(console=self._console, refresh_per_second=2) if self._console.is_terminal else None

    def __enter__(self) -> TrainingLog:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *args: Any) -> None:
        if self._live:
            self._live.stop()
        self._file.close()
        if self._writer:
            self._writer.close()

    def on_step(self, report: StepReport) -> None:
        """Records one step."""
        self._num_tokens += report.num_tokens
        self._write({**report._asdict(), "tokens_seen": self._num_tokens, "memory_bytes": peak_memory()})
        self._recent = [*self._recent, report][-WINDOW:]
        if self._live:
            self._live.update(self._table())
        elif report.step % self._print_every == 0 or report.step == self._num_steps:
            self._console.print("  ".join(f"{name} {value}" for name, value in self._summary()), highlight=False)

    def on_evaluation(self, step: int, reports: Sequence[TauReport], seconds: float) -> None:
        """Records measured tau of several budgets."""
        self._taus = list(reports)
        taus = {str(one.budget): one.tau for one in reports}
        self._write({"step": step, "tau": taus, "tokens_seen": self._num_tokens, "seconds": seconds})
        if not self._live:
            self._console.print(f"step {step}  measured {self._tau_line()}", highlight=False)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer:
            for name, value in record.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, record["step"])
            for budget, tau in record.get("tau", {}).items():
                self._writer.add_scalar(f"tau/{budget}", tau or 0.0, record["step"])

    def _summary(self) -> list[tuple[str, str]]:
        last, recent = self._recent[-1], self._recent
        seconds = sum(one.seconds for one in recent)
        elapsed = time.perf_counter() - self._begin
        left = (self._num_steps - last.step) * elapsed / max(1, last.step - self._first_step)
        depth = len(last.accuracy_by_depth)
        accuracy = [sum(one.accuracy_by_depth[d] for one in recent) / len(recent) for d in range(depth)]
        lengths = sum(one.expected_acceptance_length for one in recent) / len(recent)
        return [
            ("step", f"{last.step}/{self._num_steps}"),
            ("loss", f"{sum(one.loss for one in recent) / len(recent):.3f}"),
            ("accuracy", " ".join(f"{value:.2f}" for value in accuracy)),
            ("expected-tau", f"{lengths:.2f}"),
            ("rate", f"{last.learning_rate:.1e}"),
            ("tokens/s", f"{sum(one.num_tokens for one in recent) / seconds:.0f}"),
            ("left", _duration(left)),
            ("memory", f"{peak_memory() / 2**30:.1f} GiB"),
        ]

    def _table(self) -> Table:
        table = Table(title="training", show_header=False)
        for name, value in self._summary():
            table.add_row(name, value)
        if self._taus:
            table.add_row("measured tau", self._tau_line())
        return table

    def _tau_line(self) -> str:
        return ", ".join(f"tau@{one.budget} {'no rounds' if one.tau is None else f'{one.tau:.2f}'}" for one in self._taus)


def peak_memory() -> int:
    """Most bytes in use so far: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, steps and evaluations in the order in which they were written; none without a file."""
    path = folder / METRICS
    # A run that was killed may have left half a line.
    return [row for _, row in read_jsonl(path, finished_only=True)] if path.exists() else []


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("tensorboard=true needs the tensorboard package: pip install tensorboard") from error
    return SummaryWriter(folder / "tensorboard")
