"""Benchmark prompts: local JSONL files or hub data sets, with the published templates where they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jetflow.jsonl import read_jsonl

# Where each benchmark lies on the hub: name, config, split, and what a row's turns are.
HUB: dict[str, tuple[str, str | None, str, Callable[[Any], list[str]]]] = {
    "gsm8k": ("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"]]),
    "aime25": ("yentinglin/aime_2025", None, "train", lambda row: [row["problem"]]),
    "humaneval": ("openai/openai_humaneval", None, "test", lambda row: [row["prompt"]]),
    "mbpp": ("google-research-datasets/mbpp", "full", "test", lambda row: [row["text"]]),
    "livecodebench": ("livecodebench/code_generation_lite", "release_v5", "test", lambda row: [row["question_content"]]),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
}
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
# As in the published scripts, in our words; the benchmark's text stands at {}.
TEMPLATES = {
    "gsm8k": "{}\n" + STEP_BY_STEP,
    "math500": "{}\n" + STEP_BY_STEP,
    "aime25": "{}\n" + STEP_BY_STEP,
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```",
    "mbpp": "You are an expert Python programmer. Write a function that passes the tests.\n{}",
    "livecodebench": "Write a Python solution to the following problem.\n```\n{}\n```",
}


@dataclass(frozen=True)
class Task:
    """One benchmark conversation.

    Attributes:
        id: of the row.
        turns: the user's turns.
        reference: the right answer, where the file has one.
        tests: statements that a written program must pass, where the file has some.
    """

    id: str
    turns: tuple[str, ...]
    reference: str | None = None
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """Some rows of a benchmark.

    Attributes:
        name: of the benchmark.
        tasks: the rows.
        digest: 16 hex digits over ids and turns, templates included.
    """

    name: str
    tasks: tuple[Task, ...]
    digest: str


def read_dataset(source: str, *, count: int | None = None, skip: int = 0, published_templates: bool = False) -> Dataset:
    """Reads a benchmark from a JSONL file (`{"id", "turns", "reference"}` a line) or, by its name, from the hub.

    Args:
        source: path of a file, whose stem is the name, or one of the names in `HUB`.
        count: rows to take; all when absent.
        skip: rows to leave out in front of them.
        published_templates: put the first turn into the benchmark's published template.

    Raises:
        ValueError: the source is neither, a row lacks its turns, or no row is left.
    """
    path = Path(source)
    if path.is_file():
        name, rows = path.stem, _file_rows(path)
    elif source in HUB:
        name, rows = source, _hub_rows(source)
    else:
        raise ValueError(f"{source} is neither a file nor one of the benchmarks {', '.join(HUB)}")
    stop = None if count is None else skip + count
    template = TEMPLATES.get(name, "{}") if published_templates else "{}"
    tasks = tuple(
        replace(one, turns=(template.replace("{}", one.turns[0]), *one.turns[1:])) for one in islice(rows, skip, stop)
    )
    if not tasks:
        raise ValueError(f"{source} has no rows behind the first {skip}")
    digest = hashlib.sha256(json.dumps([[one.id, one.turns] for one in tasks]).encode()).hexdigest()[:16]
    return Dataset(name, tasks, digest)


def _file_rows(path: Path) -> Sequence[Task]:
    tasks = []
    for where, row in read_jsonl(path):
        turns = row.get("turns") or ([row["prompt"]] if "prompt" in row else None)
        if not turns:
            raise ValueError(f"{where}: a row needs turns (or prompt), found {', '.join(row)}")
        reference = row.get("reference")
        reference = None if reference is None else str(reference)
        tests = tuple(row.get("tests") or ())
        setup = row.get("test_setup_code")
        # The line's number, where a row has no name.
        name = str(row.get("id", where.rsplit(" ", 1)[-1]))
        tasks.append(Task(name, tuple(turns), reference, (setup, *tests) if setup and tests else tests))
    return tasks


def _hub_rows(name: str) -> Sequence[Task]:
    from datasets import load_dataset

    source, config, split, turns = HUB[name]
    return [Task(f"{name}-{number}", tuple(turns(row))) for number, row in enumerate(load_dataset(source, config, split=split))]
