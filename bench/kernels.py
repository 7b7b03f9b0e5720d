"""Question: do the kernels compile for GPUs that are not here, without spills and within each chip's shared memory?

    python -m bench.kernels --compile-only        (a few minutes; --quick: one shape per chip)
    python -m bench.kernels --roofline            (the floor of a call, computed)

Compiles the tree attention kernel for sm_80, sm_90 and sm_100 at real shapes and prints registers, spills, shared memory,
how many programs of a kernel fit on one multiprocessor, and whether Hopper's wgmma is used.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jetflow.kernels.commit_triton import _commit
from jetflow.kernels.cost import tree_attention_cost
from jetflow.kernels.expand import expansion_sizes
from jetflow.kernels.expand_triton import _expand, num_warps
from jetflow.kernels.top_tokens_triton import CHUNK, _chunks, _join
from jetflow.kernels.tree_attention import SPLIT
from jetflow.kernels.tree_attention_triton import _attend, tile_sizes
from jetflow.kernels.walk_triton import _walk

# Shared memory that one program may use, that of a multiprocessor, and its registers (NVIDIA's tables of compute capabilities).
CHIPS = {80: (163 * 1024, 164 * 1024, 65536), 90: (227 * 1024, 228 * 1024, 65536), 100: (227 * 1024, 228 * 1024, 65536)}
MODELS = {"Qwen3-8B": (32, 8, 128), "Qwen3-30B-A3B": (32, 4, 128), "SmolLM2-135M": (9, 3, 64)}
NODES = (16, 64, 256)
# An H100's memory and tensor cores by its data sheet.
BYTES_PER_SECOND, FLOPS_PER_SECOND = 3.35e12, 990e12


class Compiled(NamedTuple):
    """What a compiled kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    programs_per_multiprocessor: int
    uses_wgmma: bool


def compile_attention(chip: int, heads: tuple[int, int, int], nodes: int, dtype: str, page_size: int) -> Compiled:
    """Compiles the attention kernel for one chip and shape."""
    query_heads, key_heads, head_dim = heads
    group = query_heads // key_heads
    tiles = tile_sizes(nodes, group, head_dim)
    constants = {
        "G": group, "D": head_dim, "WORDS": -(-nodes // 64), "PAGE": page_size, "SPLIT": SPLIT, "BLOCK_M": tiles.block_m,
        "BLOCK_S": tiles.block_s, "BLOCK_D": tiles.block_d, "WINDOW": False, "SOFTCAP": False, "WIDE": False,
    }  # fmt: skip
    pointers = {"q_ptr": dtype, "k_ptr": dtype, "v_ptr": dtype, "bits_ptr": "i64", "starts_ptr": "i32", "prefix_ptr": "i32"}
    pointers |= {"depth_ptr": "i32", "table_ptr": "i32", "out_ptr": "fp32", "lse_ptr": "fp32"}
    # As at run time: the last axis has stride 1.
    constants |= {"q_d": 1, "k_d": 1, "v_d": 1}
    return compile_kernel(chip, _attend, constants, pointers, tiles.num_warps, floats=("scale", "softcap"))


def compile_small(chip: int) -> dict[str, Compiled]:
    """Compiles the other kernels at Qwen3-8B's shapes: 64 tokens of 151,936, trees of 256 nodes, 15 levels, heads of 128."""
    tops = {"value_ptr": "fp32", "id_ptr": "i32", "max_ptr": "fp32", "sum_ptr": "fp32"}
    ends = {"token_ptr": "i64", "log_prob_ptr": "fp32"}
    walk = dict.fromkeys(
        ("tokens_ptr", "parents_ptr", "counts_ptr", "chosen_ptr", "path_ptr", "accepted_ptr", "bonus_ptr"), "i64"
    )
    commit = {"memory_ptr": "bf16", "path_ptr": "i64", "starts_ptr": "i32", "counts_ptr": "i32", "table_ptr": "i32"}
    sizes = {"D": 128, "BLOCK_D": 128, "m_d": 1}
    chunks = -(-151936 // CHUNK)
    join = {"K": 64, "CHUNKS": triton.next_power_of_2(chunks), "BLOCK": triton.next_power_of_2(64 * chunks)}
    return {
        "top tokens, chunks": compile_kernel(chip, _chunks, {"K": 64, "CHUNK": CHUNK}, {"logits_ptr": "bf16", **tops}, 4),
        "top tokens, join": compile_kernel(chip, _join, join, {**tops, **ends}, 8),
        "expansion, one law a depth": compile_expansion(chip, num_laws=1, width=255),
        "expansion, a law a parent": compile_expansion(chip, num_laws=32, width=32),
        "acceptance walk": compile_kernel(chip, _walk, {"BLOCK": 256}, walk, 4),
        "commit": compile_kernel(chip, _commit, {**sizes, "PAGE": 0}, commit, 1),
        "commit, pages of 16": compile_kernel(chip, _commit, {**sizes, "PAGE": 16}, commit, 1),
    }


def compile_expansion(chip: int, *, num_laws: int, width: int, levels: int = 15, budget: int = 256) -> Compiled:
    """Compiles the expansion kernel."""
    sizes = expansion_sizes(levels, num_laws, width, budget)
    names = ("KEEP", "RANKS", "CANDIDATES", "ENTRIES")
    constants = {f"LOG_{name}": size.bit_length() - 1 for name, size in zip(names, sizes, strict=True)}
    pointers = dict.fromkeys(("root_ptr", "token_ptr", "column_ptr", "tokens_out", "parents_out", "depths_out"), "i64")
    pointers |= dict.fromkeys(("counts_out", "kept_token_ptr"), "i64")
    pointers |= dict.fromkeys(("law_ptr", "scores_out", "kept_score_ptr"), "fp32")
    pointers |= dict.fromkeys(("kept_parent_ptr", "kept_column_ptr", "kept_depth_ptr", "place_ptr"), "i32")
    return compile_kernel(chip, _expand, {"R": num_laws, **constants}, pointers, num_warps(sizes))


def compile_kernel(
    chip: int, kernel: Any, constants: dict[str, Any], pointers: dict[str, str], num_warps: int, floats: tuple[str, ...] = ()
) -> Compiled:
    """Compiles one kernel; arguments that are neither constants, pointers nor floats are int32."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
        else:
            signature[name] = "fp32" if name in floats else "i32"
    # Memory is aligned to 16 bytes.
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"num_warps": num_warps})
    registers, spilled = resources(compiled.asm["cubin"])
    program, multiprocessor, file = CHIPS[chip]
    shared = compiled.metadata.shared
    assert shared <= program, f"sm_{chip}: {shared} bytes of shared memory, {program} allowed"
    threads = 32 * num_warps
    fits = min(file // (registers * threads), multiprocessor // max(shared, 1), 2048 // threads)
    return Compiled(registers, spilled, shared, fits, "wgmma" in compiled.asm["ptx"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and spilled bytes (local memory) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", report).group(1)) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile-only", action="store_true")
    what.add_argument("--roofline", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    Console(width=120).print(roofline() if args.roofline else compile_table(args.quick))


def roofline() -> Table:
    """The floor of one layer's call at Qwen3-8B's shape in bfloat16."""
    table = Table("rows", "prefix", "nodes", "MB", "GFLOP", "floor, us", "bound by")
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), MODELS["Qwen3-8B"], strict=True))
    for rows in (1, 8):
        for prefix in (1024, 8192, 32768):
            for nodes in (64, 256):
                cost = tree_attention_cost([nodes] * rows, [prefix] * rows, **sizes)
                seconds = cost.seconds(BYTES_PER_SECOND, FLOPS_PER_SECOND)
                bound = "memory" if seconds == cost.num_bytes / BYTES_PER_SECOND else "arithmetic"
                numbers = (f"{cost.num_bytes / 1e6:.1f}", f"{cost.num_flops / 1e9:.2f}", f"{seconds * 1e6:.1f}")
                table.add_row(str(rows), str(prefix), str(nodes), *numbers, bound)
    return table


def compile_table(quick: bool) -> Table:
    """What the kernel uses on each chip and shape."""
    table = Table("chip", "model", "nodes", "memory", "registers", "spilled", "shared KiB", "programs per SM", "wgmma")
    for chip in CHIPS:
        for model, heads in list(MODELS.items())[: 1 if quick else None]:
            for nodes in NODES[-1:] if quick else NODES:
                for page_size in (0, 16):
                    found = compile_attention(chip, heads, nodes, "bf16", page_size)
                    memory = "contiguous" if page_size == 0 else f"pages of {page_size}"
                    numbers = (found.registers, found.spilled_bytes, f"{found.shared_bytes / 1024:.0f}")
                    last = (found.programs_per_multiprocessor, "yes" if found.uses_wgmma else "no")
                    table.add_row(f"sm_{chip}", model, str(nodes), memory, *map(str, numbers + last))
        for name, found in compile_small(chip).items():
            numbers = (
                found.registers,
                found.spilled_bytes,
                f"{found.shared_bytes / 1024:.0f}",
                found.programs_per_multiprocessor,
            )
            table.add_row(f"sm_{chip}", name, "", "", *map(str, numbers), "no")
    return table


if __name__ == "__main__":
    main()
