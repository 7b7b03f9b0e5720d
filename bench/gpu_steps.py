"""Whole steps on one device: the target's tree pass with and without graphs, and what a draft costs; for `bench.gpu_check`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from jetflow import BlockDraftHead, DraftHeadConfig, GraphSettings, ParallelDrafter, Target, TokenTree, TreeVerifier
from jetflow.graphs import Outputs, capture_cuda
from jetflow.protocols import DraftContext

REPEATS, WARMUP = 30, 5
QWEN3_8B = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def median_seconds(ways: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
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


def rerun(function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Stands in for CUDA graphs on a CPU."""
    outputs = function()

    def replay() -> None:
        for kept, new in zip(outputs, function(), strict=True):
            kept.copy_(new)

    return replay, outputs


def random_target(device: str, smoke: bool) -> Target:
    """Qwen3-8B with random weights, made on the device; no download."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**(TINY if smoke else QWEN3_8B)), dtype=torch.float32 if smoke else torch.bfloat16
        )
    return Target(model.eval(), attention="triton")


def verifier_at(target: Target, prefix: int, graphs: GraphSettings | None) -> TreeVerifier:
    """A verifier whose cache holds `prefix` tokens: what they are does not change the time."""
    verifier = TreeVerifier(target, graphs=graphs)
    verifier.prefill(torch.zeros(1, prefix, dtype=torch.int64, device=target.device), torch.tensor([prefix]))
    return verifier


def chain(nodes: int, device: str) -> TokenTree:
    """A tree of which only the number of nodes matters."""
    return TokenTree.from_parents(torch.zeros(1, nodes, dtype=torch.int64), torch.arange(-1, nodes - 1)[None]).to(device)


def kernel_seconds(step: Callable[[], Any], device: str) -> float:
    """Sum of the times of all kernels of a step; on a CPU of all operations."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    return sum(one.self_device_time_total if on_gpu else one.self_cpu_time_total for one in found.key_averages()) / 1e6


def verify_rows(target: Target, device: str, smoke: bool) -> list[dict[str, Any]]:
    """One tree pass by prefix and nodes: plain, replayed, and the sum of the replay's kernels, in seconds."""
    rows = []
    for prefix in (20,) if smoke else (1024, 8192):
        room = GraphSettings(max_tokens=prefix + 256, capture=rerun if smoke else capture_cuda)
        plain, fast = verifier_at(target, prefix, None), verifier_at(target, prefix, room)
        for nodes in (1, 5) if smoke else (1, 16, 64, 128, 256):
            tree = chain(nodes, device)
            logits = [verifier.verify(tree).logits.float() for verifier in (plain, fast)]
            # Sizes of products differ by the padding, and with them their rounding.
            same = float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean())
            ways = {"plain": lambda v=plain, t=tree: v.verify(t), "replayed": lambda v=fast, t=tree: v.verify(t)}
            seconds = median_seconds(ways, device)
            kernels = kernel_seconds(ways["replayed"], device)
            rows.append({"prefix": prefix, "nodes": nodes, "same_tokens": same, **seconds, "kernels": kernels})
    return rows


def draft_rows(target: Target, one_token: float, device: str, smoke: bool) -> list[dict[str, Any]]:
    """A draft with its tree, replayed, by block size; `c` is its time over that of a pass of one token, `one_token` seconds."""
    rows, prefix = [], 20 if smoke else 1024
    layers = target.num_layers
    taps = (0, 1) if smoke else tuple(range(1, layers, layers // 5))[:5]
    for block_size in (4,) if smoke else (4, 8, 16):
        sizes = {"num_layers": 1 if smoke else 5, "block_size": block_size, "mask_token_id": 60, "taps": taps}
        with torch.device(device):
            head = BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes)).to(target.dtype).eval()
        room = GraphSettings(max_tokens=prefix + 256, capture=rerun if smoke else capture_cuda)
        drafter = ParallelDrafter(head, target, graphs=room)
        drafter.reset(1)
        width = len(taps) * target.hidden_size
        ids = torch.zeros(1, prefix, dtype=torch.int64, device=device)
        features = torch.randn(1, prefix, width, device=device, dtype=target.dtype)
        drafter.observe(ids, features, torch.tensor([prefix]))
        context = DraftContext(ids[:, 0], torch.tensor([prefix], device=device), [[0] * (prefix + 1)], block_size - 1)
        budget = 8 if smoke else 64
        seconds = median_seconds({"draft": lambda d=drafter, c=context, b=budget: d.propose(c, b)}, device)["draft"]
        rows.append({"block_size": block_size, "budget": budget, "draft": seconds, "c": seconds / one_token})
    return rows
