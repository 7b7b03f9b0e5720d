"""The `jetflow` command. Only here are parts chosen by name."""

from __future__ import annotations

import argparse
import sys

from jetflow import __version__
from jetflow.cli.bench import add_bench_command
from jetflow.cli.decode import add_decode_commands
from jetflow.cli.regenerate import add_regenerate_command
from jetflow.cli.train import add_train_commands
from jetflow.cli.verify import add_verify_command


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(arguments)
    from transformers.utils import logging

    # Bars for models that load in a moment would stand between the lines of the output.
    logging.disable_progress_bar()
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        # Errors of the hub fill a page.
        print(f"jetflow: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jetflow", description="Lossless tree speculative decoding.")
    parser.add_argument("--version", action="version", version=f"jetflow {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_decode_commands(commands)
    add_regenerate_command(commands)
    add_train_commands(commands)
    add_verify_command(commands)
    add_bench_command(commands)
    return parser
