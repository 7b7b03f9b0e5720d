"""Question: is tree attention right on this card, and how near is it to what the memory allows?

    python -m bench.gpu_check --out results/gpu_check.json        (under 8 minutes)

First every shape and option against float32 truth; a wrong one ends the script. Then, at Qwen3-8B's shapes, one layer's
tree attention against PyTorch's SDPA with a dense mask and FlexAttention with a block mask, all in one process, taking
turns, as ratios of medians, and as a share of the memory floor: the bytes that must move (`kernels.cost`) over the copy
bandwidth measured on this card. `--smoke` runs tiny shapes on a CPU with TRITON_INTERPRET=1, to see that the script works.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from jetflow.kernels.ancestors import pack_ancestors, unpack_bits
from jetflow.kernels.cost import tree_attention_cost
from jetflow.kernels.tree_attention import tree_attention, tree_attention_reference

QWEN3_8B = (32, 8, 128)
REPEATS, WARMUP = 30, 5
# A kernel may be at most twice as wrong as PyTorch's own attention; this is the floor below which both are rounding.
FLOORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_inputs(nodes: int, prefixes: list[int], heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict:
    """Random trees of one size behind prefixes, keys and values in contiguous memory whose spare part holds NaN."""
    generator = torch.Generator().manual_seed(nodes + sum(prefixes))
    rows, (query_heads, key_heads, head_dim) = len(prefixes), heads
    parents = torch.full((rows, nodes), -1)
    depths = torch.zeros(rows, nodes, dtype=torch.int32)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(max(0, node - 16), node, (rows,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    room = max(prefixes) + nodes + 3
    memory = torch.full((2, rows, key_heads, room, head_dim), float("nan"), dtype=dtype, device=device)
    for row, prefix in enumerate(prefixes):
        memory[:, row, :, : prefix + nodes] = torch.randn(2, key_heads, prefix + nodes, head_dim, device=device).to(dtype)
    return {
        "query": torch.randn(rows * nodes, query_heads, head_dim, device=device).to(dtype),
        "key": memory[0],
        "value": memory[1],
        "bits": pack_ancestors(parents).flatten(0, 1).to(device),
        "row_starts": (torch.arange(rows + 1, dtype=torch.int32) * nodes).to(device),
        "prefix_lens": torch.tensor(prefixes, dtype=torch.int32, device=device),
        "depths": depths.flatten().to(device),
        "max_nodes": nodes,
        "max_prefix": max(prefixes),
    }


def dense_mask(inputs: dict) -> torch.Tensor:
    """bool [B, 1, N, S] over the slots in use."""
    nodes, prefixes = inputs["max_nodes"], inputs["prefix_lens"].tolist()
    own = unpack_bits(inputs["bits"], nodes).unflatten(0, (len(prefixes), nodes))
    mask = torch.zeros(len(prefixes), 1, nodes, max(prefixes) + nodes, dtype=torch.bool, device=own.device)
    for row, prefix in enumerate(prefixes):
        mask[row, 0, :, :prefix] = True
        mask[row, 0, :, prefix : prefix + nodes] = own[row]
    return mask


def sdpa(inputs: dict, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    """PyTorch's attention with the dense mask, on memory without NaN."""
    rows, length = mask.shape[0], mask.shape[-1]
    query = inputs["query"].unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    key, value = (inputs[name][:, :, :length].nan_to_num().contiguous() for name in ("key", "value"))
    return lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def flex(inputs: dict, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlexAttention, compiled, with the block mask of the same rule."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, _, nodes, length = mask.shape
    query = inputs["query"].unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    key, value = (inputs[name][:, :, :length].nan_to_num().contiguous() for name in ("key", "value"))
    block_mask = create_block_mask(lambda b, h, q, k: mask[b, 0, q, k], rows, None, nodes, length, device=mask.device.type)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)


def check(device: str, smoke: bool) -> int:
    """Compares with the float32 twin; returns how many cases were right and ends the script at a wrong one."""
    heads = [(4, 2, 16)] if smoke else [QWEN3_8B, (32, 4, 128), (9, 3, 64), (4, 2, 24), (4, 1, 80), (2, 2, 256)]
    dtypes = [torch.float32] if smoke else list(FLOORS)
    shapes = [(1, [0]), (5, [7, 130])] if smoke else [(1, [0]), (16, [1000, 3]), (63, [65]), (256, [2100, 0]), (1024, [40])]
    count = 0
    for head in heads:
        for nodes, prefixes in shapes:
            for dtype in dtypes:
                inputs = make_inputs(nodes, prefixes, head, dtype, device)
                for settings in ({}, {"window": 50}, {"softcap": 5.0}):
                    out, _ = tree_attention(**inputs, **settings)
                    exact = {name: one.float() if name in ("query", "key", "value") else one for name, one in inputs.items()}
                    expected, _ = tree_attention_reference(**exact, **settings)
                    error, floor = (out.float() - expected).abs().max().item(), FLOORS[dtype]
                    if settings == {}:
                        mask = dense_mask(inputs)
                        found = sdpa(inputs, mask)().transpose(1, 2).flatten(0, 1).float()
                        floor = max(floor, 2 * (found - expected).abs().max().item())
                    if not error <= floor:
                        sys.exit(f"wrong: {head} {nodes} {prefixes} {dtype} {settings}: error {error}, allowed {floor}")
                    count += 1
    return count


def median_seconds(ways: dict[str, Callable[[], torch.Tensor]], device: str) -> dict[str, float]:
    """Median seconds of each way, taking turns; a write over the cache between calls makes each start cold."""
    cold = torch.empty(256 * 2**20 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARMUP + REPEATS if device == "cuda" else 2):
        for name, way in ways.items():
            cold.zero_()
            if device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                way()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end) / 1e3
            else:
                start = time.perf_counter()
                way()
                took = time.perf_counter() - start
            if turn >= (WARMUP if device == "cuda" else 0):
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds({"copy": lambda: target.copy_(source)}, device)["copy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --smoke runs tiny shapes on a CPU")
    print(f"{check(device, args.smoke)} cases right", flush=True)
    bandwidth = copy_bandwidth(device)
    heads = (4, 2, 16) if args.smoke else QWEN3_8B
    table, rows = Table("rows", "prefix", "nodes", "us", "x SDPA", "x Flex", "of the memory floor"), []
    for batch in (1,) if args.smoke else (1, 8):
        for prefix in (70,) if args.smoke else (1024, 8192, 32768):
            for nodes in (5,) if args.smoke else (16, 64, 128, 256):
                inputs = make_inputs(nodes, [prefix] * batch, heads, torch.float32 if args.smoke else torch.bfloat16, device)
                mask = dense_mask(inputs)
                ways = {"jetflow": lambda inputs=inputs: tree_attention(**inputs)[0], "sdpa": sdpa(inputs, mask)}
                if device == "cuda":
                    ways["flex"] = flex(inputs, mask)
                seconds = median_seconds(ways, device)
                sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
                floor = tree_attention_cost([nodes] * batch, [prefix] * batch, **sizes).num_bytes / bandwidth
                rows.append({"rows": batch, "prefix": prefix, "nodes": nodes, "floor_seconds": floor, "seconds": seconds})
                ours = seconds["jetflow"]
                others = [f"{seconds[name] / ours:.2f}" if name in seconds else "-" for name in ("sdpa", "flex")]
                table.add_row(*map(str, (batch, prefix, nodes, round(ours * 1e6))), *others, f"{floor / ours:.0%}")
    Console(width=100).print(table)
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted"
    print(f"{card}, copy bandwidth {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}, triton {triton.__version__}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"card": card, "copy_bandwidth": bandwidth, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
