"""Question: what does a loss over a large vocabulary cost in memory and time, whole, in chunks, and over a sample?

    python -m bench.losses --out results/losses.json        (--smoke: small sizes, seconds)

Each way runs in a process of its own, so that its peak memory is its own; the median of several passes, forward and
backward. Slots are hidden states of a head; draft and target share the output embedding, as in training.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from jetflow.losses import CrossEntropy, ForwardKL
from jetflow.training.chunked import chunked_sum
from jetflow.training.vocabulary import SampledVocabulary

WAYS = ("plain", "chunks of 1024", "chunks of 256", "sample of 10240, chunks of 1024")
LOSSES = {"cross-entropy": CrossEntropy, "forward-kl": ForwardKL}


def measure(way: str, loss_name: str, sizes: dict[str, int], queue: multiprocessing.Queue) -> None:
    """Peak memory above what the inputs take, and the median seconds of a pass, into `queue`."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    slots, vocab, width = sizes["slots"], sizes["vocab"], sizes["width"]
    weight = torch.randn(vocab, width) * width**-0.5
    hidden, final = torch.randn(slots, width), torch.randn(slots, width)
    labels, loss = torch.randint(vocab, (slots,)), LOSSES[loss_name]()
    uses_target = getattr(loss, "uses_target", True)

    def summed(part: torch.Tensor, places: slice, matrix: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_logits = nn.functional.linear(final[places], matrix) if uses_target else None
        return loss(nn.functional.linear(part, matrix), target_logits, picked[places]).sum()

    def one_pass() -> None:
        states = hidden.clone().requires_grad_()
        if way == "plain":
            total = summed(states, slice(None), weight, labels)
        else:
            matrix, picked = weight, labels
            if way.startswith("sample"):
                sample = SampledVocabulary(torch.arange(sizes["frequent"]), vocab, num_random=sizes["random"]).sample(labels)
                matrix, picked = weight[sample.token_ids], sample.index_of(labels)
            chunk = int(way.rsplit(" ", 1)[1])

            def of_chunk(part: torch.Tensor, places: slice) -> tuple[torch.Tensor, torch.Tensor]:
                return summed(part, places, matrix, picked), torch.zeros(len(part), 2)

            total, _ = chunked_sum(states, of_chunk, chunk)
        total.backward()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(sizes["passes"]):
        begin = time.perf_counter()
        one_pass()
        seconds.append(time.perf_counter() - begin)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    queue.put(SimpleNamespace(peak_gib=peak, seconds=statistics.median(seconds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    sizes = {"slots": 2048, "vocab": 151_936, "width": 1024, "frequent": 8192, "random": 2048, "passes": 3}
    if args.smoke:
        sizes = {"slots": 512, "vocab": 2000, "width": 64, "frequent": 200, "random": 100, "passes": 2}
    table = Table(
        "loss", "way", "peak GiB above inputs", "slots/s", title=f"{sizes['slots']} slots, vocabulary {sizes['vocab']}"
    )
    context, rows = multiprocessing.get_context("spawn"), []
    for loss_name in LOSSES:
        for way in WAYS:
            queue = context.Queue()
            process = context.Process(target=measure, args=(way, loss_name, sizes, queue))
            process.start()
            found = queue.get()
            process.join()
            rate = sizes["slots"] / found.seconds
            rows.append({"loss": loss_name, "way": way, "peak_gib": round(found.peak_gib, 3), "slots_per_second": round(rate)})
            table.add_row(loss_name, way, f"{found.peak_gib:.2f}", f"{rate:.0f}")
    Console().print(table)
    if args.out:
        report = {"sizes": sizes, "rows": rows, "torch": torch.__version__, "machine": platform.machine()}
        args.out.write_text(json.dumps({**report, "command": "python -m bench.losses"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
