"""Runs methods on benchmarks, taking turns on every prompt, one record per text; a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jetflow.benchmark.datasets import Dataset, Task
from jetflow.benchmark.memory import peak_bytes, reset_peak
from jetflow.benchmark.methods import Method
from jetflow.chat import chat_ids
from jetflow.jsonl import cut_unfinished, read_jsonl
from jetflow.targets import Target

BASELINE = "plain"
# Benchmark, task, turn, method.
Key = tuple[str, str, int, str]


def run_benchmark(
    target: Target,
    methods: Mapping[str, Method],
    datasets: Sequence[Dataset],
    out: Path,
    *,
    settings: Mapping[str, Any],
    max_new_tokens: int,
    batch_size: int = 1,
    seed: int = 0,
    on_record: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Writes one JSON line per text to `out`, settings first, behind what an earlier run left there.

    On each batch of prompts the methods take turns, and who begins changes from batch to batch, so that drift of the machine
    hits all alike. One short unmeasured text of each comes first. In a later turn of a conversation all continue the first
    method's answer.

    Args:
        target: the model, with a tokenizer; prompts go through its chat template where it has one.
        methods: by name; the first one is the baseline and must be plain decoding.
        datasets: what to run on.
        out: JSONL file.
        settings: written into the first line; a file with others is refused.
        max_new_tokens: most new tokens of a text.
        batch_size: most prompts of a benchmark that are continued together.
        seed: of sampling.
        on_record: called with the numbers of texts done and wanted.

    Returns:
        The records of all texts.

    Raises:
        ValueError: the first method is not `plain`, or `out` was written with other settings.
    """
    names = list(methods)
    if names[0] != BASELINE:
        raise ValueError(f"the first method must be {BASELINE!r}, the baseline, got {names[0]!r}")
    header = {"settings": {**settings, "datasets": {one.name: one.digest for one in datasets}}}
    records = _found(out, header)
    done = {(one["dataset"], one["task"], one["turn"], one["method"]): one for one in records}
    total = len(names) * sum(len(task.turns) for one in datasets for task in one.tasks)
    for method in methods.values():
        method([[*target.tokenizer("Warm up.").input_ids][:16] or [1]], min(8, max_new_tokens), seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        if out.stat().st_size == 0:
            file.write(json.dumps(header) + "\n")
        number = 0
        for dataset, tasks, turn in _batches(datasets, batch_size):
            prompts = [_prompt(target, dataset, task, turn, done) for task in tasks]
            first = number % len(names)
            number += 1
            for name in names[first:] + names[:first]:
                keys = [(dataset.name, task.id, turn, name) for task in tasks]
                if any(key not in done for key in keys):
                    reset_peak(target.device)
                    texts = methods[name](prompts, max_new_tokens, seed)
                    peak = peak_bytes(target.device)
                    for key, task, prompt, written in zip(keys, tasks, prompts, texts, strict=True):
                        if key in done:
                            continue
                        done[key] = dict(zip(("dataset", "task", "turn", "method"), key, strict=True)) | vars(written)
                        text = target.tokenizer.decode(written.token_ids, skip_special_tokens=True)
                        done[key] |= {"num_prompt_tokens": len(prompt), "text": text, "peak_bytes": peak}
                        if len(task.turns) == 1:
                            done[key] |= {"reference": task.reference, "tests": list(task.tests)}
                        file.write(json.dumps(done[key]) + "\n")
                    file.flush()
                if on_record:
                    on_record(len(done), total)
    return list(done.values())


def _batches(datasets: Sequence[Dataset], batch_size: int) -> Iterator[tuple[Dataset, list[Task], int]]:
    """Tasks that are run together, with equally many turns, turn by turn."""
    for dataset in datasets:
        for num_turns, same in groupby(dataset.tasks, key=lambda task: len(task.turns)):
            tasks = list(same)
            for start in range(0, len(tasks), batch_size):
                for turn in range(num_turns):
                    yield dataset, tasks[start : start + batch_size], turn


def _prompt(target: Target, dataset: Dataset, task: Task, turn: int, done: Mapping[Key, Mapping[str, Any]]) -> list[int]:
    """The conversation up to a turn, with the baseline's answers to those before."""
    messages: list[dict[str, str]] = []
    for number, text in enumerate(task.turns[: turn + 1]):
        if number:
            answer = done[dataset.name, task.id, number - 1, BASELINE]["token_ids"]
            messages.append({"role": "assistant", "content": target.tokenizer.decode(answer, skip_special_tokens=True)})
        messages.append({"role": "user", "content": text})
    return chat_ids(target.tokenizer, messages, plain_text=True)


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads a results file: its settings and its records; a last line that was not finished is left out.

    Raises:
        ValueError: the file has no settings in its first line.
    """
    whole = [row for _, row in read_jsonl(path, finished_only=True)]
    if not whole or "settings" not in whole[0]:
        raise ValueError(f"{path} holds no settings in its first line; is it a file of jetflow bench?")
    return whole[0]["settings"], whole[1:]


def _found(out: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not out.exists() or out.stat().st_size == 0:
        return []
    settings, records = read_records(out)
    wanted = json.loads(json.dumps(header["settings"]))
    for name in sorted({*settings, *wanted}):
        if settings.get(name) != wanted.get(name):
            raise ValueError(
                f"{out} was written with {name}={settings.get(name)}, this run has {wanted.get(name)}; go on with the same "
                "settings, or write to another file"
            )
    cut_unfinished(out)
    return records
