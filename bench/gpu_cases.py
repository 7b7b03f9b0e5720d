"""Every kernel on one device against its plain twin in float32; `bench.gpu_check` runs it, a wrong case ends the script."""

import copy
import sys
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config

from jetflow import BlockDraftHead, DraftHeadConfig, MarginalSource, PairwiseSource
from jetflow.kernels.ancestors import pack_ancestors, unpack_bits
from jetflow.kernels.commit import commit_path, commit_path_reference
from jetflow.kernels.expand import expand_tree, expand_tree_reference
from jetflow.kernels.top_tokens import top_tokens, top_tokens_reference
from jetflow.kernels.tree_attention import tree_attention, tree_attention_reference
from jetflow.kernels.walk import accept_walk, accept_walk_reference
from jetflow.trees.sources import known_laws

QWEN3_8B = (32, 8, 128)
# A kernel may be at most twice as wrong as PyTorch's own attention; this is the floor below which both are rounding.
FLOORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SETTINGS = ({}, {"window": 50}, {"softcap": 5.0})


def make_inputs(
    nodes: int, prefixes: list[int], heads: tuple[int, int, int], dtype: torch.dtype, device: str, page_size: int | None = None
) -> dict:
    """Random trees of one size behind prefixes; the spare part of memory, contiguous or in shuffled pages, holds NaN."""
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
    table = None
    if page_size is not None:
        per_row = -(-room // page_size)
        table = torch.randperm(rows * per_row, generator=generator).view(rows, per_row).int().to(device)
        padded = torch.nn.functional.pad(memory, (0, 0, 0, per_row * page_size - room), value=float("nan"))
        pages = torch.empty(2, rows * per_row, page_size, key_heads, head_dim, dtype=dtype, device=device)
        pages[:, table.flatten().long()] = padded.unflatten(3, (per_row, page_size)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2)
        memory = pages
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
        "block_table": table,
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
    """PyTorch's attention with the dense mask, on contiguous memory without NaN."""
    rows, length = mask.shape[0], mask.shape[-1]
    query = inputs["query"].unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    key, value = (inputs[name][:, :, :length].nan_to_num().contiguous() for name in ("key", "value"))
    return lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def check_attention(device: str, smoke: bool) -> int:
    """Tree attention over contiguous and paged memory, with windows and soft caps; returns the number of cases."""
    heads = [(4, 2, 16)] if smoke else [QWEN3_8B, (32, 4, 128), (9, 3, 64), (4, 2, 24), (4, 1, 80), (2, 2, 256)]
    shapes = [(5, [7, 130])] if smoke else [(1, [0]), (16, [1000, 3]), (63, [65]), (256, [2100, 0]), (1024, [40])]
    cases = [
        (head, *shape, dtype, page_size)
        for head in heads
        for shape in shapes
        for dtype in ([torch.float32] if smoke else FLOORS)
        for page_size in ((None, 1, 16, 64, 256) if head == heads[0] else (None,))
    ]
    for head, nodes, prefixes, dtype, page_size in cases:
        inputs = make_inputs(nodes, prefixes, head, dtype, device, page_size)
        exact = {name: one.float() if name in ("query", "key", "value") else one for name, one in inputs.items()}
        for settings in SETTINGS:
            out, _ = tree_attention(**inputs, **settings)
            expected, _ = tree_attention_reference(**exact, **settings)
            error, floor = (out.float() - expected).abs().max().item(), FLOORS[dtype]
            if settings == {} and page_size is None:
                found = sdpa(inputs, dense_mask(inputs))().transpose(1, 2).flatten(0, 1).float()
                floor = max(floor, 2 * (found - expected).abs().max().item())
            what = f"attention {head} {nodes} nodes behind {prefixes}, {dtype}, pages of {page_size}, {settings}"
            require(error <= floor, f"{what}: error {error}, allowed {floor}")
    return len(cases) * len(SETTINGS)


def check_top_tokens(device: str, smoke: bool) -> int:
    """The likeliest tokens of laws with ties."""
    vocab, count = (3000, 5) if smoke else (151_936, 64)
    logits = (4 * torch.randn(3, vocab, device=device)).round() / 4
    for dtype in FLOORS:
        found, expected = top_tokens(logits.to(dtype), count), top_tokens_reference(logits.to(dtype), count)
        require(torch.equal(found[0], expected[0]), f"top tokens, {dtype}: other tokens")
        require(torch.allclose(found[1], expected[1], atol=1e-4), f"top tokens, {dtype}: other log-probabilities")
    return len(FLOORS)


def check_expansion(device: str, smoke: bool) -> int:
    """Trees of marginal and pairwise laws with ties, node for node."""
    cases = [(3, 4, 9)] if smoke else [(1, 1, 2), (7, 16, 64), (15, 32, 128), (15, 32, 256), (15, 255, 256)]
    count = 0
    for depth, width, budget in cases:
        # Multiples of 1/8 have exact sums, so that many scores are equal.
        laws = -torch.randint(0, 30, (4, depth, width, width), device=device).float() / 8
        tokens = torch.rand(4, depth, 1000, device=device).argsort(-1)[..., :width]
        sources = [MarginalSource(tokens, laws[:, :, 0].sort(-1, descending=True).values)]
        if width <= 32:
            sources.append(PairwiseSource(tokens, laws[:, 0, 0], laws[:, 1:]))
        for source in sources:
            tables, roots = known_laws(source, depth).tables(), torch.arange(4, device=device)
            found, expected = expand_tree(roots, *tables, budget), expand_tree_reference(roots, *tables, budget)
            for one, other in zip(found, expected, strict=True):
                require(torch.equal(one, other), f"expansion {type(source).__name__} {depth} {width} {budget}: another tree")
            count += 1
    return count


def check_walk_and_commit(device: str, smoke: bool) -> int:
    """The acceptance walk, and the commit over contiguous and paged memory."""
    nodes, head_dim = (9, 16) if smoke else (256, 128)
    parents = torch.tensor(
        [[-1, *(torch.randint(node, ()).item() for node in range(1, nodes))] for _ in range(3)], device=device
    )
    tokens = torch.stack([torch.randperm(nodes, device=device) for _ in range(3)])
    counts = torch.full((3,), nodes, device=device)
    # The target chooses one of the children, or, behind a leaf, nothing.
    chosen = torch.full_like(tokens, -1).scatter(1, parents[:, 1:], tokens[:, 1:])
    depth = 12
    found, expected = (walk(tokens, parents, counts, chosen, depth) for walk in (accept_walk, accept_walk_reference))
    require(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), "the acceptance walk")
    path = torch.rand(3, nodes - 1, device=device).argsort(-1)[:, :5].sort(-1).values + 1
    path = torch.cat([torch.zeros_like(path[:, :1]), path], dim=1)
    starts, kept = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([5, 0, 17], [6, 3, 1]))
    for page_size in (None, 1, 16, 64, 256):
        per_row = 0 if page_size is None else -(-(17 + nodes) // page_size)
        table = None if page_size is None else torch.randperm(3 * per_row, device=device).view(3, -1).int()
        shape = (4, 3, 2, 17 + nodes, head_dim) if page_size is None else (4, 3 * per_row, page_size, 2, head_dim)
        memory = torch.randn(shape, device=device)
        other = memory.clone()
        commit_path(memory, path, starts, kept, block_table=table)
        commit_path_reference(other, path, starts, kept, block_table=table)
        require(torch.equal(memory, other), f"commit, pages of {page_size}")
    return 6


@torch.no_grad()
def check_head(device: str, smoke: bool) -> int:
    """The head's block over its cached context, by the kernel on the device, against masked attention on the CPU."""
    width, heads = (32, 4) if smoke else (512, 8)
    config = Qwen3Config(
        vocab_size=61, hidden_size=width, intermediate_size=width, num_hidden_layers=4, num_attention_heads=heads,
        num_key_value_heads=heads // 2, head_dim=width // heads, max_position_embeddings=4096,
    )  # fmt: skip
    for causal in (True, False):
        sizes = {"num_layers": 2, "block_size": 16, "mask_token_id": 60, "taps": (0, 1, 3), "causal": causal}
        head = BlockDraftHead(DraftHeadConfig.for_target(config, **sizes)).eval()
        features, blocks = torch.randn(3, 40, 3 * width), torch.randn(3, 16, width)
        mask = torch.ones(16, 16, dtype=torch.bool)
        mask = mask.tril() if causal else mask
        cache = head.new_cache(3)
        head.extend_context(cache, features, [40, 0, 7])
        expected = head.draft(blocks, cache, mask)
        there = copy.deepcopy(head).to(device)
        cache = there.new_cache(3)
        there.extend_context(cache, features.to(device), [40, 0, 7])
        with cache.static_slots(torch.tensor([40, 0, 7], device=device), 64):
            found = there.draft(blocks.to(device), cache, mask.to(device))
        require(torch.allclose(found.cpu(), expected, atol=1e-4), f"the head's block, causal={causal}")
    return 2


def check_all(device: str, smoke: bool) -> int:
    """Runs all checks; returns the number of cases."""
    torch.manual_seed(0)
    # Products in full float32, as the truth is.
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = (check_attention, check_top_tokens, check_expansion, check_walk_and_commit, check_head)
    return sum(check(device, smoke) for check in checks)


def require(right: bool, what: str) -> None:
    """Ends the script where a case is wrong."""
    if not right:
        sys.exit(f"wrong: {what}")
