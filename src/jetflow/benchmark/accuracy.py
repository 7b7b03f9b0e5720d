"""Task accuracy, to show that it does not move: exact match of final answers, and tests of written code if that is wanted."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
# LaTeX that says nothing about the value.
SPACING = re.compile(
    r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\^\\circ|\^\{\\circ\}|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\s"
)
CODE_SECONDS, CODE_BYTES = 10, 1 << 30


def final_answer(text: str) -> str | None:
    """The answer that a text ends with: its last `\\boxed{...}`, what follows its last `####`, or its last number."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place]
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(found: str | None, reference: str) -> bool:
    """Whether two answers are the same value or, where they are no numbers, the same LaTeX but for spacing."""
    if found is None:
        return False
    ours, theirs = _normal(found), _normal(reference)
    if ours == theirs:
        return True
    numbers = [_number(one) for one in (ours, theirs)]
    return None not in numbers and abs(numbers[0] - numbers[1]) <= 1e-9 * max(1.0, abs(numbers[1]))  # type: ignore[operator, arg-type]


def passes_tests(text: str, tests: Sequence[str], *, seconds: float = CODE_SECONDS) -> bool:
    """Runs the code in a text, then tests, in a process of its own with limits on time and memory.

    The limits keep accidents small; they are no sandbox. Run it only where running a model's code is acceptable.

    Args:
        text: an answer; its last fenced block, or all of it where there is none.
        tests: statements that must not raise.
        seconds: most time.
    """
    blocks = FENCE.findall(text)
    code = "\n".join([LIMITS.format(bytes=CODE_BYTES, seconds=int(seconds) + 1), blocks[-1] if blocks else text, *tests])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.py"
        path.write_text(code)
        try:
            run = subprocess.run(
                [sys.executable, "-I", str(path)], cwd=folder, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return False
    return run.returncode == 0


LIMITS = """import resource
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def _normal(answer: str) -> str:
    plain = SPACING.sub("", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    # A fraction without braces, and a name in front of the value.
    plain = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", plain)
    return plain.split("=")[-1]


def _number(answer: str) -> float | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", answer)
    if fraction:
        sign, above, below = fraction.groups()
        return (-1 if sign else 1) * int(above) / int(below) if int(below) else None
    if re.fullmatch(r"-?\d+/\d+", answer):
        above, below = answer.split("/")
        return int(above) / int(below) if int(below) else None
    try:
        return float(answer.replace(",", ""))
    except ValueError:
        return None
