"""Question: what do stop rules, processors, streaming and log-probabilities cost a round when none of them is used?

    python -m bench.unused_settings

Times the calls that a round makes on their behalf, within real rounds of the tiny pair, as a share of the rounds' time.
"""

import argparse
import statistics
import time
from pathlib import Path

import jetflow.decoding as decoding
from jetflow import ParallelDrafter, SpeculativeDecoder, Target, load_head
from jetflow.demo import heldout_rows
from jetflow.request import Request

MODELS = Path("models/tiny")


class Stopwatch:
    """Adds up the seconds that wrapped functions take."""

    def __init__(self):
        self.seconds = 0.0

    def wrap(self, function):
        """Returns `function`, timed."""

        def timed(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def main() -> None:
    """Decodes the held-out prompts and prints the share, median over prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--budget", type=int, default=16)
    args = parser.parse_args()
    target = Target.from_pretrained(MODELS / "target")
    decoder = SpeculativeDecoder(target, ParallelDrafter(load_head(MODELS / "head"), target), budget=args.budget)
    prompts = [target.chat_ids(row["prompt"]) for row in heldout_rows(MODELS, args.prompts)]
    watch = Stopwatch()
    for name in ("keep", "process", "prune"):
        setattr(Request, name, watch.wrap(getattr(Request, name)))
    decoding.log_probs_of = watch.wrap(decoding.log_probs_of)
    shares = []
    for prompt in prompts:
        watch.seconds = 0.0
        result = decoder.generate(prompt, max_new_tokens=128)
        shares.append(watch.seconds / (result.seconds - result.prefill_seconds))
    print(f"{len(prompts)} texts, budget {args.budget}: {100 * statistics.median(shares):.2f} % of a round's time")


if __name__ == "__main__":
    main()
