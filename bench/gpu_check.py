"""Question: are the kernels right on this card, how near are they to what the memory allows, and what does a whole step cost?

    python -m bench.gpu_check --out results/gpu_check.json        (under 8 minutes)

    1. Every kernel, shape and option against its twin in float32 (`bench.gpu_cases`); a wrong one ends the script.
    2. One layer's tree attention at Qwen3-8B's shapes against PyTorch's SDPA with a dense mask, FlexAttention with a block mask
       and, where it is installed, flash-attn without any mask, all in one process, taking turns, as ratios of medians; and as a
       share of the memory floor: the bytes that must move (`kernels.cost`) over the copy bandwidth measured on this card.
    3. Tree passes of a Qwen3-8B of random weights with graphs off and on, a replay against the sum of its kernels, and the
       draft's cost ratio c by block size (`bench.gpu_steps`).

`--smoke` runs every stage at tiny shapes on a CPU with TRITON_INTERPRET=1, to see that the script works.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from bench.gpu_cases import QWEN3_8B, check_all, dense_mask, make_inputs, sdpa
from bench.gpu_steps import draft_rows, median_seconds, random_target, verify_rows
from rich.console import Console
from rich.table import Table

from jetflow.kernels.cost import tree_attention_cost
from jetflow.kernels.tree_attention import tree_attention

OTHERS = ("sdpa", "flex", "flash-attn")


def flex(inputs: dict, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlexAttention, compiled, with the block mask of the same rule."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, _, nodes, length = mask.shape
    query = inputs["query"].unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    key, value = (inputs[name][:, :, :length].nan_to_num().contiguous() for name in ("key", "value"))
    block_mask = create_block_mask(lambda b, h, q, k: mask[b, 0, q, k], rows, None, nodes, length, device=mask.device.type)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)


def flash(inputs: dict, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    """flash-attn over the same keys; it has no tree mask, so this is what the products and reads alone take it."""
    from flash_attn import flash_attn_func

    rows, _, _, length = mask.shape
    query = inputs["query"].unflatten(0, (rows, -1))
    key, value = (inputs[name][:, :, :length].nan_to_num().transpose(1, 2).contiguous() for name in ("key", "value"))
    return lambda: flash_attn_func(query, key, value)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds({"copy": lambda: target.copy_(source)}, device)["copy"]


def attention_rows(bandwidth: float, device: str, smoke: bool) -> list[dict[str, Any]]:
    """One layer's attention by rows, prefix and nodes."""
    heads = (4, 2, 16) if smoke else QWEN3_8B
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    rows = []
    for batch in (1,) if smoke else (1, 8):
        for prefix in (70,) if smoke else (1024, 8192, 32768):
            for nodes in (5,) if smoke else (16, 64, 128, 256):
                inputs = make_inputs(nodes, [prefix] * batch, heads, torch.float32 if smoke else torch.bfloat16, device)
                mask = dense_mask(inputs)
                ways = {"jetflow": lambda inputs=inputs: tree_attention(**inputs)[0], "sdpa": sdpa(inputs, mask)}
                if device == "cuda":
                    ways["flex"] = flex(inputs, mask)
                    if find_spec("flash_attn") is not None:
                        ways["flash-attn"] = flash(inputs, mask)
                seconds = median_seconds(ways, device)
                floor = tree_attention_cost([nodes] * batch, [prefix] * batch, **sizes).num_bytes / bandwidth
                rows.append({"rows": batch, "prefix": prefix, "nodes": nodes, "floor_seconds": floor, "seconds": seconds})
    return rows


def show(attention: list[dict], verify: list[dict], draft: list[dict]) -> None:
    """Prints three tables."""
    console, table = (
        Console(width=110),
        Table("rows", "prefix", "nodes", "us", *(f"x {name}" for name in OTHERS), "of the floor"),
    )
    for row in attention:
        ours, seconds = row["seconds"]["jetflow"], row["seconds"]
        others = [f"{seconds[name] / ours:.2f}" if name in seconds else "-" for name in OTHERS]
        sizes = (row["rows"], row["prefix"], row["nodes"], round(ours * 1e6))
        table.add_row(*map(str, sizes), *others, f"{row['floor_seconds'] / ours:.0%}")
    console.print(table)
    table = Table("prefix", "nodes", "plain, ms", "replayed, ms", "sum of its kernels, ms", "replay / kernels", "same tokens")
    for row in verify:
        times = [f"{1000 * row[name]:.3f}" for name in ("plain", "replayed", "kernels")]
        ratio = f"{row['replayed'] / row['kernels']:.2f}" if row["kernels"] else "-"
        table.add_row(str(row["prefix"]), str(row["nodes"]), *times, ratio, f"{row['same_tokens']:.0%}")
    console.print(table)
    table = Table("block size", "budget", "draft, ms", "c")
    for row in draft:
        table.add_row(str(row["block_size"]), str(row["budget"]), f"{1000 * row['draft']:.3f}", f"{row['c']:.3f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --smoke runs tiny shapes on a CPU")
    begin = time.perf_counter()
    print(f"{check_all(device, args.smoke)} cases right after {time.perf_counter() - begin:.0f} s", flush=True)
    bandwidth = copy_bandwidth(device)
    attention = attention_rows(bandwidth, device, args.smoke)
    print(f"attention measured after {time.perf_counter() - begin:.0f} s", flush=True)
    target = random_target(device, args.smoke)
    verify = verify_rows(target, device, args.smoke)
    draft = draft_rows(target, verify[0]["replayed"], device, args.smoke)
    show(attention, verify, draft)
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted"
    print(f"{card}, copy bandwidth {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}, triton {triton.__version__}")
    print(f"done after {time.perf_counter() - begin:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"card": card, "copy_bandwidth": bandwidth, "attention": attention, "verify": verify, "draft": draft}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
