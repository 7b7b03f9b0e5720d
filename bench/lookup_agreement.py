"""Question: how far can a copied token be trusted, by how many tokens agree before it?

    python -m bench.lookup_agreement ANSWERS.jsonl [--count 150]

Reads answers that `jetflow regenerate` wrote. For each token of each answer it looks up the latest earlier place with the
longest agreement and counts how often the same token follows there. Prints the shares beside `CONFIDENCE` of prompt lookup,
which are such counts over 150 answers of SmolLM2-135M-Instruct, rounded by eye; other models and texts have other ones.
Half a minute.
"""

import argparse
import random
from pathlib import Path

import numpy as np

from jetflow.drafters.prompt_lookup import CONFIDENCE, latest_matches
from jetflow.jsonl import read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--count", type=int, default=150)
    args = parser.parse_args()
    rows = [row for _, row in read_jsonl(args.answers)]
    random.Random(0).shuffle(rows)
    longest = len(CONFIDENCE)
    counts, hits = np.zeros(longest + 1, dtype=int), np.zeros(longest + 1, dtype=int)
    for row in rows[: args.count]:
        ids = np.asarray(row["token_ids"])
        for begin, end in row["loss_spans"]:
            for place in range(begin, end):
                size, found = latest_matches(ids[:place], longest, depth=1, limit=1)
                if size:
                    counts[size] += 1
                    hits[size] += found[0][0] == ids[place]
    print("agree  tokens  share  CONFIDENCE")
    for size in range(1, longest + 1):
        share = f"{hits[size] / counts[size]:5.2f}" if counts[size] else "    -"
        print(f"{size:5}  {counts[size]:6}  {share}  {CONFIDENCE[size - 1]:10.2f}")


if __name__ == "__main__":
    main()
