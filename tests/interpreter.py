"""Triton's interpreter: it is chosen when triton is loaded, so that its tests run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IS_ON = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_ON, reason="runs in the process that has the interpreter")


def run_in_interpreter(file: str, *options: str) -> str:
    """Runs the tests of a file in a process that has the interpreter and returns its output; skips without triton."""
    if IS_ON:
        pytest.skip("this is the process that has the interpreter")
    pytest.importorskip("triton", reason="kernels need triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", file, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout
