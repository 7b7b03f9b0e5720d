"""How long and how fast to train."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps.
        rows_per_pass: rows that one device computes at a time; what is left of a step's rows is accumulated.
        learning_rate: peak, reached after `warmup_steps`, then a cosine down to `min_lr_ratio` of it.
        warmup_steps: steps of linear rise.
        min_lr_ratio: share of the peak at the end.
        clip_norm: largest norm of the gradient.
        precision: `float32`, or `bfloat16` for autocast over float32 weights.
        shard_head: shard the head over the processes (FSDP2) instead of keeping a copy on each (DDP).
        shard_target: shard the target's layers over the processes instead of keeping a copy on each.
        activation_checkpointing: recompute each draft layer in the backward pass instead of keeping its activations.
        ema_decay: keep an average of the weights with this decay, which is what is evaluated and saved as the head.
        seed: of everything random.
        checkpoint_every: steps between checkpoints.
        keep_last: checkpoints kept.
        evaluate_every: steps between evaluations.

    Raises:
        ValueError: a number is out of its range or `precision` is unknown.
    """

    steps: int
    rows_per_pass: int = 8
    learning_rate: float = 3e-4
    warmup_steps: int = 100
    min_lr_ratio: float = 0.0
    clip_norm: float = 1.0
    precision: str = "bfloat16"
    shard_head: bool = False
    shard_target: bool = False
    activation_checkpointing: bool = False
    ema_decay: float | None = None
    seed: int = 0
    checkpoint_every: int = 500
    keep_last: int = 2
    evaluate_every: int = 500

    def __post_init__(self) -> None:
        for name in ("steps", "rows_per_pass", "checkpoint_every", "keep_last", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} and clip_norm={self.clip_norm} must be above 0")
        if self.warmup_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be 0 or more, min_lr_ratio={self.min_lr_ratio} in [0, 1]")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be float32 or bfloat16, got {self.precision!r}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in (0, 1), got {self.ema_decay}")

    def that_matter(self) -> dict[str, float | str | None]:
        """The settings that change the weights at the end, but for the number of steps, which a later run may raise."""
        names = ("learning_rate", "warmup_steps", "min_lr_ratio", "clip_norm", "precision", "ema_decay", "seed")
        return {name: getattr(self, name) for name in names}

    def rate_factor(self, step: int) -> float:
        """Share of the peak learning rate in `step`, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
