"""The script for a GPU runs all of its stages on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_every_stage_runs_at_tiny_shapes(tmp_path):
    pytest.importorskip("triton", reason="kernels need triton")
    root, out = Path(__file__).parents[2], tmp_path / "report.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu_check", "--smoke", "--out", str(out)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    # Attention 5 x 3, top tokens 3, expansion 2, walk and commits 6, the head's block 2.
    assert run.stdout.startswith("28 cases right")
    report = json.loads(out.read_text())
    assert [row["same_tokens"] for row in report["verify"]] == [1.0, 1.0]
    assert {"attention", "verify", "draft"} < set(report)
    assert report["draft"][0]["c"] == report["draft"][0]["draft"] / report["verify"][0]["replayed"]
