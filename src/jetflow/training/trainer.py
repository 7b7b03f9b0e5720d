"""Trainer: the loop around `block_loss`, or `unrolled_loss` for EAGLE-3 heads. One code for one CPU and for many GPUs.

Everything random is a function of seed and step, and everything else is in the checkpoint, so that a run that was killed
and goes on ends with the same weights as one that was not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.checkpoint import save_head
from jetflow.heads.eagle_config import EagleHeadConfig
from jetflow.heads.eagle_head import EagleHead
from jetflow.targets import Target
from jetflow.training.checkpoints import last_checkpoint, load_checkpoint, save_checkpoint
from jetflow.training.eagle import UnrollSettings, check_kind, unrolled_loss
from jetflow.training.optimizers import adamw
from jetflow.training.rows import AnchoredBatch, TrainingRows
from jetflow.training.settings import TrainSettings
from jetflow.training.sharding import shard_head, shard_target
from jetflow.training.step import StepOutput, StepSettings, TeacherStates, block_loss
from jetflow.training.totals import StepReport, StepTotals, sum_passes

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
# Turns a batch into the target's states, from a cache on disk instead of a pass of the target.
StateSource = Callable[[AnchoredBatch], TeacherStates]


class NonFiniteLossError(ValueError):
    """The loss was NaN or infinite; the batch behind it lies in the file that the message names."""


class Trainer:
    """Trains a draft head for a frozen target.

    Args:
        head: the head, with float32 weights.
        target: the frozen model; a replica on each device.
        rows: what to train on.
        folder: where checkpoints, logs and the finished head go.
        settings: how long and how fast.
        step_settings: the loss and how it is computed; `UnrollSettings` for an EAGLE-3 head.
        make_optimizers: builds the optimizers over the head's parameters; AdamW with betas (0.9, 0.95) when absent.
        states: the target's states of a batch, from a cache; computed by the target when absent.
        on_evaluation: called every so many steps with the step and the head (averaged weights where there are some), on the
            first process.
        on_step: called with each step's report on the first process.
        accelerator: device and processes; a new one when absent.

    Attributes:
        step: optimizer steps done.
        stopped: whether the run was asked to stop and did so before its end.

    Raises:
        ValueError: the head's weights are not float32, sharding is asked for without several processes, or the settings are
            those of the other kind of head.
    """

    def __init__(
        self,
        head: BlockDraftHead | EagleHead,
        target: Target,
        rows: TrainingRows,
        *,
        folder: Path,
        settings: TrainSettings,
        step_settings: StepSettings | UnrollSettings,
        make_optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]] | None = None,
        states: StateSource | None = None,
        on_evaluation: Callable[[int, BlockDraftHead | EagleHead], Any] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        accelerator: Accelerator | None = None,
    ):
        if any(weight.dtype != torch.float32 for weight in head.parameters()):
            raise ValueError(f"head must hold float32 weights, which bfloat16 autocast updates, got {head.fc.weight.dtype}")
        check_kind(head, settings, step_settings)
        self.accelerator = accelerator or Accelerator()
        self.target, self.rows, self.folder = target, rows, folder
        self.settings, self.step_settings = settings, step_settings
        self.states, self.on_evaluation, self.on_step = states, on_evaluation, on_step
        head.train()
        if isinstance(head, BlockDraftHead):
            head.activation_checkpointing = settings.activation_checkpointing
        if settings.shard_target:
            shard_target(target)
        self.head: Any = head
        self._draft_tokens = head.draft_tokens if isinstance(head, EagleHead) else None
        if settings.shard_head and isinstance(head, BlockDraftHead):
            shard_head(head)
        else:
            self.head = self.accelerator.prepare_model(head)
            # A wrapper hands calls on, but no attributes.
            self.head.config = head.config
        make = make_optimizers or adamw
        self.optimizers = make(self.head, settings.learning_rate)
        self.step = 0
        self._average = None if settings.ema_decay is None else {k: v.clone() for k, v in self._weights().items()}
        self._asked_to_stop = threading.Event()
        self.stopped = False

    def resume(self) -> bool:
        """Goes on from the newest whole checkpoint in the folder; returns whether there was one.

        Raises:
            ValueError: it was written with other data or settings, or is damaged.
        """
        path = last_checkpoint(self.folder / "checkpoints")
        if path is None:
            return False
        state = load_checkpoint(path)
        for name, value in self._stamp().items():
            if state["stamp"][name] != value:
                raise ValueError(
                    f"{path} was written with {name} {state['stamp'][name]}, this run has {value}; go on with the same "
                    "recipe and data, or choose another folder"
                )
        set_model_state_dict(self.head, state["head"], options=LOAD)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            set_optimizer_state_dict(self.head, optimizer, saved, options=LOAD)
        self.step, self._average = state["step"], state["average"]
        torch.set_rng_state(state["rng"])
        return True

    def run(self) -> None:
        """Trains to the end, or until SIGTERM; saves checkpoints on the way and at the end.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite.
            OSError: a checkpoint cannot be written.
        """
        with self._listen():
            while self.step < self.settings.steps and not self.stopped:
                report = self._one_step()
                due = self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps
                if self.accelerator.is_main_process and self.on_step:
                    self.on_step(report)
                if due or self.stopped:
                    self.save()
                if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps:
                    self.evaluate()

    def stop(self) -> None:
        """Asks the run to end after the next step, with a checkpoint."""
        self._asked_to_stop.set()

    def save(self) -> None:
        """Writes a checkpoint."""
        weights = self._weights()
        optimizers = [get_optimizer_state_dict(self.head, one, options=FULL) for one in self.optimizers]
        if self.accelerator.is_main_process:
            state = {"step": self.step, "head": weights, "optimizers": optimizers, "average": self._average}
            state |= {"rng": torch.get_rng_state(), "stamp": self._stamp()}
            save_checkpoint(self.folder / "checkpoints", self.step, state, keep_last=self.settings.keep_last)
        self.accelerator.wait_for_everyone()

    def evaluate(self) -> None:
        """Hands the head to `on_evaluation`, on the first process, in evaluation mode."""
        head = self.finished_head()
        if head is not None and self.on_evaluation:
            self.on_evaluation(self.step, head)
        self.accelerator.wait_for_everyone()

    def finished_head(self, dtype: torch.dtype | None = None) -> BlockDraftHead | EagleHead | None:
        """Returns a copy of the head, averaged weights where there are some; None but on the first process.

        All processes must call it. The copy has the target's dtype unless told otherwise.
        """
        weights = self._weights()
        if not self.accelerator.is_main_process:
            return None
        config = self.head_config
        copy = EagleHead(config, self._draft_tokens) if isinstance(config, EagleHeadConfig) else BlockDraftHead(config)
        copy.load_state_dict(weights if self._average is None else self._average)
        return copy.to(self.target.device, dtype or self.target.dtype).eval()

    def save_head(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the head in the public format; all processes must call it."""
        head = self.finished_head(dtype)
        if head is not None:
            save_head(head, folder)

    @property
    def head_config(self) -> Any:
        """The head's config."""
        return self.head.config

    def _one_step(self) -> StepReport:
        begin = time.perf_counter()
        epoch, rows = self.rows.rows_of_step(self.step)
        mine = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        size = self.settings.rows_per_pass
        passes = [mine[start : start + size] for start in range(0, len(mine), size)] or [[]]
        outputs: list[StepOutput] = []
        num_tokens = 0
        for index, part in enumerate(passes):
            last = index == len(passes) - 1
            # Gradients of all devices are joined once, in the last pass.
            context = nullcontext() if last else self.accelerator.no_sync(self.head)
            with context:
                # A device without rows still takes part with a row whose slots do not count.
                anchored = self.rows.collate(part or rows[:1], epoch).to(self.target.device)
                if not part:
                    anchored = anchored._replace(valid=torch.zeros_like(anchored.valid))
                out = self._pass(anchored)
                self._check_finite(out, anchored)
                (out.loss * out.weight_sum).backward()
            num_tokens += sum(end - begin for row in anchored.documents for _, begin, end in row)
            outputs.append(out._replace(loss=out.loss.detach()))
        # A signal reaches processes at different moments; all stop after the step in which the first has seen it.
        summed = self.accelerator.reduce(sum_passes(outputs, num_tokens, self._asked_to_stop.is_set()), reduction="sum")
        totals = StepTotals.from_tensor(summed)
        self.stopped = totals.num_stops > 0
        self._apply(totals.weight_sum)
        self.step += 1
        return self._report(totals, time.perf_counter() - begin)

    def _pass(self, anchored: AnchoredBatch) -> StepOutput:
        states = self.states(anchored) if self.states else None
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        bfloat16 = self.settings.precision == "bfloat16"
        where: dict[str, Any] = {"anchors": anchored.anchors, "valid": anchored.valid, "states": states}
        settings = self.step_settings
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=bfloat16):
            if isinstance(settings, UnrollSettings):
                return unrolled_loss(self.head, self.target, anchored.batch, settings=settings, **where)
            return block_loss(self.head, self.target, anchored.batch, settings=settings, generator=generator, **where)

    def _apply(self, weight_sum: float) -> None:
        """Divides the summed gradients by the weight of the whole step, and takes the step."""
        # Wrapped models average over devices; the sum is wanted.
        scale = self.accelerator.num_processes / weight_sum if weight_sum > 0 else 0.0
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self._grad_norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip_norm)
        factor = self.settings.rate_factor(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        if self._average is not None:
            decay = min(self.settings.ema_decay or 0.0, (1 + self.step) / (10 + self.step))
            for name, weight in self._weights().items():
                self._average[name].lerp_(weight, 1 - decay)

    def _report(self, totals: StepTotals, seconds: float) -> StepReport:
        norm = self._grad_norm.full_tensor() if hasattr(self._grad_norm, "full_tensor") else self._grad_norm
        rate = self.settings.learning_rate * self.settings.rate_factor(self.step - 1)
        return totals.report(step=self.step, learning_rate=rate, grad_norm=float(norm), seconds=seconds)

    def _stamp(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {**self.settings.that_matter(), "rows": self.rows.fingerprint}

    def _weights(self) -> dict[str, Tensor]:
        """All weights on the first process, nothing on the others."""
        weights = cast(dict[str, Tensor], get_model_state_dict(self.head, options=FULL))
        return {name: value.clone() for name, value in weights.items()}

    def _check_finite(self, out: StepOutput, anchored: AnchoredBatch) -> None:
        if bool(torch.isfinite(out.loss)):
            return
        path = self.folder / f"nonfinite-step-{self.step + 1}-rank-{self.accelerator.process_index}.pt"
        batch = anchored.to("cpu")
        torch.save({"batch": batch.batch._asdict(), "anchors": batch.anchors, "valid": batch.valid}, path)
        raise NonFiniteLossError(f"the loss of step {self.step + 1} is {out.loss.item()}; its batch is saved in {path}")

    @contextmanager
    def _listen(self) -> Iterator[None]:
        """SIGTERM ends the run after the step that is going on; the handler that was there comes back afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
