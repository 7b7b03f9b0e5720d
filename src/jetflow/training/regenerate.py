"""Regeneration: the target answers prompts itself, so that a head learns the very text it will have to predict."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jetflow.chat import Message
from jetflow.jsonl import cut_unfinished, read_jsonl
from jetflow.targets import Target
from jetflow.training.data import Conversation, Span


@dataclass(frozen=True)
class RegenerationSettings:
    """How the target answers.

    Attributes:
        max_new_tokens: most tokens of one answer.
        temperature: 0 is greedy, which is right for a head that serves greedy decoding.
        top_k: keep this many most likely tokens when sampling.
        top_p: keep the smallest set of tokens with at least this probability when sampling.
        num_samples: answers to each prompt.
        seed: makes sampling repeatable.
        template_args: arguments of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: a number is out of its range, several greedy answers are asked for, which would be equal, or `top_k` or
            `top_p` with a temperature of 0.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_samples: int = 1
    seed: int = 0
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(f"top_k={self.top_k} and top_p={self.top_p} need a temperature above 0, got 0")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(f"num_samples={self.num_samples} greedy answers would be equal; set a temperature above 0")


class Job(NamedTuple):
    """One answer that is still to be written: a conversation and which of its samples."""

    conversation: Conversation
    sample: int


class Answered(NamedTuple):
    """An answered conversation: all its messages, the sequence, the spans of the answers and why each ended."""

    messages: list[Message]
    token_ids: list[int]
    loss_spans: list[Span]
    finish_reasons: list[str]


Answer = Callable[[list[Job]], Iterable[tuple[Job, Answered]]]


class RegenerationReport(NamedTuple):
    """What a run did: answers written now, answers found from an earlier run, jobs that the answerer left out."""

    num_written: int
    num_found: int
    num_left_out: int


def regenerate(
    conversations: Iterable[Conversation],
    answer: Answer,
    out: Path,
    *,
    settings: RegenerationSettings,
    fingerprint: str,
    on_answer: Callable[[int, int], None] | None = None,
) -> RegenerationReport:
    """Writes one JSON line per answer to `out`, behind those that an earlier run left there.

    A line holds `id`, `sample`, `messages`, `token_ids`, `loss_spans`, `finish_reasons`, `settings` and `target`.
    Whatever moment a run is killed at, the next one writes each missing answer once and nothing twice.

    Args:
        conversations: prompts; their own assistant turns are replaced.
        answer: answers jobs in any order, such as `TargetAnswerer` or `EndpointAnswerer`.
        out: JSONL file.
        settings: written into every line.
        fingerprint: names the target, see `target_fingerprint`.
        on_answer: called with the numbers of answers done and wanted.

    Raises:
        ValueError: there are no conversations, two have one id, or `out` was written with other settings or by another
            target.
    """
    jobs = [Job(one, sample) for one in conversations for sample in range(settings.num_samples)]
    if not jobs:
        raise ValueError("conversations must hold at least one prompt, got none")
    keys = [(job.conversation.id, job.sample) for job in jobs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"conversation ids must differ, but {twice[0]!r} stands twice")
    stamp = {"settings": asdict(settings), "target": fingerprint}
    done = _found_answers(out, stamp) & set(keys)
    left = [job for job, key in zip(jobs, keys, strict=True) if key not in done]
    written = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        for job, answered in answer(left):
            record = {"id": job.conversation.id, "sample": job.sample, **answered._asdict(), **stamp}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            written += 1
            if on_answer:
                on_answer(len(done) + written, len(jobs))
        os.fsync(file.fileno())
    return RegenerationReport(written, len(done), len(left) - written)


def target_fingerprint(target: Target) -> str:
    """Names a target by its weights: 16 hex digits over names, shapes and a sample of the values of all parameters.

    It is the same for every dtype that the weights are loaded in, and for one checkpoint wherever it lies.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(target.model.named_parameters()):
        flat = weight.detach().flatten()
        step = max(1, flat.numel() // 64)
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat[::step][:64].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _found_answers(out: Path, stamp: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Reads what an earlier run wrote and cuts off a last line that it could not finish."""
    if not out.exists():
        return set()
    cut_unfinished(out)
    found = set()
    stamp = json.loads(json.dumps(stamp))
    for where, record in read_jsonl(out):
        for name, value in stamp.items():
            if record.get(name) != value:
                raise ValueError(
                    f"{where} was written with {name} {record.get(name)}, this run has {value}; "
                    "continue with the same, or write to another file"
                )
        found.add((record["id"], record["sample"]))
    return found
