"""Checkpoints of a training run: written whole or not at all, the last few and the best kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

STATE, LAST_STEPS = "state.pt", "step-"


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int = 2) -> Path:
    """Writes `state` as the checkpoint of `step`.

    It is written into a temporary folder, flushed to disk and renamed, so that a checkpoint that can be seen is whole,
    whenever the process or the machine stops. Older ones but the last `keep_last` go afterwards.

    Raises:
        OSError: it cannot be written, for example because the disk is full; the checkpoints before stay as they are.
        ValueError: `keep_last` is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    final = folder / f"{LAST_STEPS}{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        with (temporary / STATE).open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        # A checkpoint of this very step, from before a restart, is replaced.
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = last_checkpoint(folder)
        kept = f"the last whole checkpoint is {last}" if last else "there is no whole checkpoint yet"
        raise OSError(f"the checkpoint of step {step} could not be written to {folder} ({error}); {kept}") from error
    for old in checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Returns the whole checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob(f"{LAST_STEPS}*") if (path / STATE).is_file())


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint in `folder`, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; its tensors come to the CPU.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"the checkpoint {path} is damaged ({error}); delete it to go on from the one before") from error


def _sync(folder: Path) -> None:
    """Makes the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
