"""Reading JSON Lines, also files that a killed process left with half a line at their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path, *, finished_only: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place (file and line, for error messages) and the object of each line that is not empty.

    Args:
        path: the file, UTF-8.
        finished_only: leave out a last line without its line break, which is one that was being written.

    Raises:
        ValueError: a line is no JSON object; the message names its place.
        OSError: there is no such file.
    """
    content = Path(path).read_bytes()
    if finished_only:
        # Before decoding: what was being written may end inside a character.
        content = content[: content.rfind(b"\n") + 1]
    # Not splitlines: it also breaks at separators that may stand inside a JSON string.
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
        yield where, row


def cut_unfinished(path: Path) -> None:
    """Cuts a file off behind its last whole line, so that a run can go on writing to it."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
