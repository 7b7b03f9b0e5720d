"""Question: what does a draft cost next to a target pass, and what speedup does that leave?

Command:  python examples/ablations/draft_cost.py        (--quick: 3 minutes, --smoke: seconds)
Run time: about 3 minutes on two CPU cores.
Expected: one draft pass costs the same for every block size and little more for a longer context, so that the cost per drafted
token falls with the block. The paper (Table 12, H200, Qwen3-8B): c is 15.0, 3.4, 0.84 and 0.21 % for 1, 4, 16 and 64 tokens.

c is the time of one draft pass by the drafted tokens N and by the time of one target pass over one token. With a chance a of
accepting each token a chain gains (1 - a^(N+1)) / ((1 - a) (N c + 1)) (Leviathan et al., arXiv 2211.17192, Theorem 3.8). The
head has random weights: a cost does not depend on them.
"""

import math
import statistics
import time

import torch
from options import arguments, make_lab
from report import print_table, write

from jetflow import masks
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.config import DraftHeadConfig
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier

CONTEXTS, BLOCKS, ACCEPTANCES = (128, 256, 512, 900), (2, 4, 8, 16, 32, 64), (0.6, 0.7, 0.8, 0.9)


def seconds_of(ways: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each way, taking turns."""
    found = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn > 1:
                found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in found.items()}


@torch.no_grad()
def cost(lab, context: int, blocks: tuple[int, ...], repeats: int) -> dict[int, tuple[float, float]]:
    """Seconds of a draft pass, and the cost ratio c, by drafted tokens."""
    target = lab.target
    verifier = TreeVerifier(target)
    ids = torch.randint(0, target.vocab_size, (1, context), device=target.device)
    verifier.prefill(ids, torch.tensor([context], device=target.device))
    root = TokenTree.root_only(ids[:, -1])
    ways = {"verify": lambda: verifier.verify(root)}
    for block in blocks:
        sizes = {"num_layers": lab.num_layers, "mask_token_id": 0, "taps": lab.taps}
        config = DraftHeadConfig.for_target(target.config, block_size=block, **sizes)
        head = BlockDraftHead(config).to(target.device, target.dtype)
        cache = head.new_cache(1)
        width = len(config.taps) * config.target_hidden_size
        head.extend_context(cache, torch.randn(1, context, width, device=target.device, dtype=target.dtype), [context])
        rule = masks.in_block(causal=True, block_size=block, context_len=0)
        mask = masks.dense(rule, 1, 1, block, block, device=target.device)[0, 0]
        tokens = torch.zeros(1, block, dtype=torch.int64, device=target.device)

        def draft(head=head, cache=cache, mask=mask, tokens=tokens) -> None:
            target.lm_head(head.draft(target.embed(tokens), cache, mask)[:, 1:])

        ways[f"draft {block}"] = draft
    seconds = seconds_of(ways, repeats)
    found = {block - 1: seconds[f"draft {block}"] for block in blocks}
    return {drafts: (took, took / (drafts * seconds["verify"])) for drafts, took in found.items()}


def speedup(acceptance: float, drafts: int, ratio: float) -> float:
    return (1 - acceptance ** (drafts + 1)) / ((1 - acceptance) * (drafts * ratio + 1))


def main() -> None:
    args = arguments(__doc__)
    lab = make_lab(args)
    contexts, blocks = (CONTEXTS[:1], BLOCKS[:2]) if args.smoke else (CONTEXTS, BLOCKS)
    repeats = 1 if args.smoke else 5 if args.quick else 25
    costs = {context: cost(lab, context, blocks, repeats) for context in contexts}
    rows = [
        [str(context), *(f"{took * 1e3:.2f} ms, c = {ratio:.1%}" for took, ratio in row.values())]
        for context, row in costs.items()
    ]
    table = print_table(["context", *(f"{block - 1} drafted" for block in blocks)], rows)
    middle = costs[contexts[len(contexts) // 2]]
    gains = {a: {drafts: round(speedup(a, drafts, c), 2) for drafts, (_, c) in middle.items()} for a in ACCEPTANCES}
    first, last = min(middle), max(middle)
    lines = [f"Speedup to expect of a chain with acceptance {a}: {gain}" for a, gain in gains.items()]
    lines.append(
        f"Paper's finding (the pass costs nearly the same for every block, so c falls as 1 / N): from {first} to {last} "
        f"drafted tokens c falls from {middle[first][1]:.1%} to {middle[last][1]:.1%} here, and the pass takes "
        f"{middle[last][0] / middle[first][0]:.1f} times as long: a CPU computes the tokens of a block one by one, on a GPU "
        "they share one reading of the weights."
    )

    series = {f"acceptance {a}": list(gain.items()) for a, gain in gains.items()}
    top = 4 * math.ceil(max(y for points in series.values() for _, y in points) / 4)
    title = "expected speedup of a chain by drafted tokens"
    drawn = {"title": title, "series": series, "x_label": "drafted tokens", "top": top, "ticks": list(middle)}
    plain = {context: {drafts: list(values) for drafts, values in row.items()} for context, row in costs.items()}
    results = {"seconds_and_c": plain, "speedups": gains}
    write("draft_cost", args, lab, results, tables=[table], lines=lines, charts={"draft_cost": drawn})


if __name__ == "__main__":
    main()
