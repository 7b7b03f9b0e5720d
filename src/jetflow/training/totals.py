"""What one optimizer step did: summed over its passes and over all devices, and reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetflow.training.step import StepOutput


class StepReport(NamedTuple):
    """What one optimizer step did, summed over passes and devices. `step` counts from 1."""

    step: int
    loss: float
    accuracy_by_depth: list[float]
    expected_acceptance_length: float
    learning_rate: float
    grad_norm: float
    num_tokens: int
    num_slots: int
    seconds: float


class StepTotals(NamedTuple):
    """Sums over the passes of a step and all devices; `hits` and `slots` hold one entry per depth."""

    weight_sum: float
    loss_sum: float
    num_anchors: float
    length_sum: float
    num_tokens: float
    num_stops: float
    hits: list[float]
    slots: list[float]

    @classmethod
    def from_tensor(cls, summed: Tensor) -> StepTotals:
        """Reads what `sum_passes` laid out."""
        weight, loss, anchors, lengths, tokens, stops, *by_depth = summed.tolist()
        depth = len(by_depth) // 2
        return cls(weight, loss, anchors, lengths, tokens, stops, by_depth[:depth], by_depth[depth:])

    def report(self, *, step: int, learning_rate: float, grad_norm: float, seconds: float) -> StepReport:
        """Turns sums into means."""
        return StepReport(
            step=step,
            loss=self.loss_sum / self.weight_sum if self.weight_sum else 0.0,
            accuracy_by_depth=[hits / slots if slots else 0.0 for hits, slots in zip(self.hits, self.slots, strict=True)],
            expected_acceptance_length=self.length_sum / self.num_anchors if self.num_anchors else 0.0,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            num_tokens=int(self.num_tokens),
            num_slots=int(sum(self.slots)),
            seconds=seconds,
        )


def sum_passes(outputs: Sequence[StepOutput], num_tokens: int, asked_to_stop: bool) -> Tensor:
    """Sums over the passes of one device: a float64 vector in the order of `StepTotals`, to be added up over devices."""
    slots = torch.stack([out.num_slots_by_depth.double() for out in outputs])
    hits = (torch.stack([out.accuracy_by_depth.double() for out in outputs]) * slots).sum(0)
    weights = torch.stack([out.weight_sum.double() for out in outputs])
    losses = torch.stack([out.loss.double() for out in outputs])
    anchors = torch.stack([out.num_anchors.double() for out in outputs])
    lengths = torch.stack([out.expected_acceptance_length.double() for out in outputs])
    sums = [weights.sum(), (losses * weights).sum(), anchors.sum(), (lengths * anchors).sum()]
    counts = torch.tensor([num_tokens, float(asked_to_stop)], dtype=torch.float64, device=slots.device)
    return torch.cat([torch.stack(sums), counts, hits, slots.sum(0)])
