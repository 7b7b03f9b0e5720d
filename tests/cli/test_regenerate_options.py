"""Options of `jetflow regenerate`."""

import pytest
from recipes import PAIR

from jetflow.cli import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "http://localhost:1/v1"], "--endpoint and --model belong together"),
        (["--concurrency", "4"], "--concurrency=4 is for an --endpoint"),
        (
            ["--endpoint", "http://localhost:1/v1", "--model", "m", "--batch-size", "4"],
            "--batch-size=4 is for a target in this",
        ),
        (["--endpoint", "http://localhost:1/v1", "--model", "m", "--device", "cpu"], "--device=cpu is for a target in this"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--top-k", "4"], "top_k=4 and top_p=None need a temperature above 0"),
    ],
)
def test_options_of_regenerate_that_nothing_reads_are_refused(tmp_path, capsys, options, message):
    arguments = ["--target", str(PAIR / "target"), "--prompts", str(PAIR / "heldout.jsonl"), "--out", str(tmp_path / "a")]
    assert main(["regenerate", *arguments, *options]) == 2
    assert message in capsys.readouterr().err
