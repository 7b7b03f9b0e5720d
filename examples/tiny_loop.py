"""What the stages of `examples/train_tiny.py` share: batches, the optimizer loop, stages, and the folder at the end."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from jetflow.protocols import Acceptor
from jetflow.targets import Target
from jetflow.training import Batch
from jetflow.training.answering import answer_prompts

CARD = Path(__file__).with_name("tiny_card.md")
Row = tuple[list[int], int]  # token ids of prompt and answer, and how many of them are the prompt


def orders(rows: list[Row], size: int, seed: int) -> Iterator[list[int]]:
    """Endless shuffled batches of indices; rows of like length go together."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        pools = [order[i : i + 512] for i in range(0, len(order), 512)]
        order = [i for pool in pools for i in sorted(pool, key=lambda i: len(rows[i][0]))]
        for part in torch.randperm(len(order) // size, generator=generator).tolist():
            yield order[part * size : (part + 1) * size]


def pad(rows: list[Row]) -> Batch:
    """A batch of rows (token ids, prompt length), padded last."""
    token_ids = torch.zeros(len(rows), max(len(ids) for ids, _ in rows), dtype=torch.int64)
    loss_mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (ids, prompt_len) in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        loss_mask[row, prompt_len : len(ids)] = True
    return Batch(token_ids, loss_mask)


def batches(rows: list[Row], size: int, seed: int) -> Iterator[Batch]:
    """Endless shuffled batches of rows."""
    for chosen in orders(rows, size, seed):
        yield pad([rows[i] for i in chosen])


def answers(
    target: Target,
    asked: list[list[int]],
    acceptor: Acceptor,
    max_new_tokens: int,
    *,
    size: int,
    generator: torch.Generator | None = None,
) -> list[Row]:
    """What the target writes behind prompts of token ids; `size` prompts of like length run together."""
    asked, rows = sorted(asked, key=len), []
    for start in range(0, len(asked), size):
        part = asked[start : start + size]
        found = answer_prompts(target, part, acceptor, max_new_tokens, generator=generator)
        rows += [(ids + answer, len(ids)) for ids, answer in zip(part, found, strict=True)]
    return rows


def train(
    module: nn.Module,
    steps: int,
    schedule: Callable[[float], float],
    loss_of: Callable[[], tuple[Tensor, str]],
    *,
    warmup: int = 50,
) -> None:
    """Trains matrices with Muon, the rest with AdamW; `schedule` maps the share of steps done to a rate factor."""
    named = list(module.named_parameters())
    matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=2.5e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    factors = [LambdaLR(one, lambda i: min((i + 1) / warmup, 1.0) * schedule(i / steps)) for one in optimizers]
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss, line = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for part in (*optimizers, *factors):
            part.step()
        module.zero_grad()
        if step % math.ceil(steps / 15) == 0:
            rate = step / (time.perf_counter() - begin)
            print(f"  step {step:5d}  loss {loss.item():.3f}{line}  {rate:.1f} steps/s", flush=True)


class Stages:
    """Runs stages whose output is not there yet, and remembers how long each took."""

    def __init__(self, work: Path):
        work.mkdir(parents=True, exist_ok=True)
        self._file = work / "seconds.json"
        self.seconds: dict[str, int] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def run(self, name: str, output: Path, stage: Callable[[], object]) -> None:
        if output.exists():
            print(f"{name}: found {output}", flush=True)
            return
        print(name, flush=True)
        begin = time.perf_counter()
        stage()
        self.seconds[name] = round(time.perf_counter() - begin)
        self._file.write_text(json.dumps(self.seconds))


def write_pair(work: Path, out: Path, heldout: list[dict[str, str]], result: dict[str, object]) -> None:
    """Puts target, head, held-out prompts, measured result and a card that states it into one folder."""
    for part in ("target", "head"):
        shutil.copytree(work / part, out / part, dirs_exist_ok=True)
    lines = [json.dumps({"id": i, "kind": doc["kind"], "prompt": doc["prompt"]}) for i, doc in enumerate(heldout)]
    (out / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "README.md").write_text(CARD.read_text().format(**result))
