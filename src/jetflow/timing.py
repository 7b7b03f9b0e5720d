"""PhaseTimer: seconds by phase of a round, on a CPU or on a CUDA device."""

from __future__ import annotations

import time
from typing import Any

import torch


class PhaseTimer:
    """Measures consecutive phases; on CUDA by events, so that no phase waits for the device.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Ends the running phase and begins `phase`."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def stop(self) -> dict[str, float]:
        """Ends the last phase and returns the seconds of each phase, in order of their first mark."""
        self.mark("")
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            spent = begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + spent
        self._marks = []
        return seconds
