"""The most memory that a piece of work took: of the CUDA device, or of this process where the kernel tells (Linux)."""

from __future__ import annotations

from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What resets the peak of the resident memory, see proc(5).
RESET_PEAK = "5"


def reset_peak(device: torch.device) -> None:
    """Begins a new peak; does nothing where none is known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        CLEAR.write_text(RESET_PEAK)


def peak_bytes(device: torch.device) -> int | None:
    """Returns the most bytes in use since `reset_peak`, weights included; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not CLEAR.exists():
        return None
    (line,) = (one for one in STATUS.read_text().splitlines() if one.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
