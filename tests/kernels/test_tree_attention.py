"""Tree attention: the twin against plain loops, the Triton kernel under the interpreter against the twin."""

import pytest
import torch
from interpreter import IS_ON, interpreted, run_in_interpreter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jetflow.kernels.ancestors import pack_ancestors, unpack_bits
from jetflow.kernels.tree_attention import tree_attention, tree_attention_reference

TOLERANCE = 1e-5


def random_tree(nodes, generator):
    parents = torch.full((1, nodes), -1)
    for node in range(1, nodes):
        parents[0, node] = int(torch.randint(node, (1,), generator=generator))
    depths = torch.zeros(nodes, dtype=torch.int32)
    for node in range(1, nodes):
        depths[node] = depths[parents[0, node]] + 1
    return pack_ancestors(parents)[0], depths


def make_case(sizes, prefixes, *, heads=(4, 2), head_dim=16, dtype=torch.float32, page_size=None, spare=float("nan"), seed=0):
    """Trees of these sizes behind these prefixes; unused memory holds `spare`."""
    generator = torch.Generator().manual_seed(seed)
    query_heads, key_heads = heads
    words = -(-max(sizes) // 64)
    trees = [random_tree(size, generator) for size in sizes]
    bits = torch.cat([torch.nn.functional.pad(one, (0, words - one.shape[1])) for one, _ in trees]).contiguous()
    depths = torch.cat([one for _, one in trees])
    query = torch.randn(sum(sizes), query_heads, head_dim, generator=generator).to(dtype)
    room = max(prefix + size for prefix, size in zip(prefixes, sizes, strict=True)) + 5
    memory = torch.full((2, len(sizes), key_heads, room, head_dim), spare, dtype=dtype)
    for row, (prefix, size) in enumerate(zip(prefixes, sizes, strict=True)):
        used = torch.randn(2, key_heads, prefix + size, head_dim, generator=generator).to(dtype)
        memory[:, row, :, : prefix + size] = used
    starts = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    given = {"max_nodes": max(sizes), "max_prefix": max(prefixes)}
    key, value = memory
    if page_size is not None:
        key, value, given["block_table"] = paged(memory, page_size, generator, spare)
    return (query, key, value, bits, starts, torch.tensor(prefixes, dtype=torch.int32), depths), given


def paged(memory, page_size, generator, spare):
    """Spreads contiguous memory [2, B, Hk, S, D] over shuffled pages."""
    _, rows, heads, room, head_dim = memory.shape
    per_row = -(-room // page_size)
    order = torch.randperm(rows * per_row + 3, generator=generator)[: rows * per_row].view(rows, per_row)
    pages = torch.full((2, rows * per_row + 3, page_size, heads, head_dim), spare, dtype=memory.dtype)
    for row in range(rows):
        for place in range(per_row):
            part = memory[:, row, :, place * page_size : (place + 1) * page_size]
            pages[:, order[row, place], : part.shape[2]] = part.transpose(1, 2)
    return pages[0], pages[1], order.int()


SETTINGS = [{}, {"scale": 0.3}, {"window": 3}, {"window": 40}, {"softcap": 5.0}, {"window": 7, "softcap": 2.0}]
cases = pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ",".join(f"{k}={v}" for k, v in one.items()) or "plain")


@cases
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_twin_equals_attention_written_out(settings, page_size):
    arguments, given = make_case([5, 1, 9], [7, 0, 30], page_size=page_size)
    out, lse = tree_attention_reference(*arguments, **given, **settings)
    plain, _ = make_case([5, 1, 9], [7, 0, 30])
    query, key, value, bits, starts, prefixes, depths = plain
    scale, window, softcap = (settings.get(name) for name in ("scale", "window", "softcap"))
    for row, prefix in enumerate(prefixes.tolist()):
        for node in range(int(starts[row]), int(starts[row + 1])):
            own = prefix + int(depths[node])
            seen = [s for s in range(prefix) if window is None or s > own - window]
            for j in range(int(starts[row + 1] - starts[row])):
                position = prefix + int(depths[starts[row] + j])
                if bits[node, j // 64] >> (j % 64) & 1 and (window is None or position > own - window):
                    seen.append(prefix + j)
            for head in range(4):
                logits = key[row, head // 2, seen] @ query[node, head] * (scale or 16**-0.5)
                logits = softcap * torch.tanh(logits / softcap) if softcap else logits
                torch.testing.assert_close(lse[node, head], logits.logsumexp(0), atol=TOLERANCE, rtol=0)
                expected = logits.softmax(0) @ value[row, head // 2, seen]
                torch.testing.assert_close(out[node, head], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, g: a.__setitem__(0, a[0][:, :3]), r"query heads \(3\) must be a multiple of key-value heads \(2\)"),
        (lambda a, g: a.__setitem__(2, a[2][..., :8]), "key and value must share one shape ending in D=16"),
        (lambda a, g: a.__setitem__(2, a[2].half()), "must be of one float dtype"),
        (lambda a, g: a.__setitem__(3, a[3].int()), r"bits must be contiguous int64 \[6, W\]"),
        (lambda a, g: a.__setitem__(4, a[4].long()), r"row_starts must be int32 \[3\]"),
        (lambda a, g: g.update(max_nodes=70), "max_nodes=70 must be in"),
        (lambda a, g: g.update(window=0), "window must be at least 1, got 0"),
        (lambda a, g: g.update(softcap=0.0), "softcap must be above 0, got 0.0"),
        (lambda a, g: a.__setitem__(1, a[1][:1]), "key and value must share one shape"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments, given = make_case([5, 1], [7, 0])
    arguments = list(arguments)
    change(arguments, given)
    with pytest.raises(ValueError, match=message):
        tree_attention_reference(*arguments, **given)


# The interpreter is chosen when triton is first imported, so these run in a process of their own.
KERNEL_CASES = {
    "one node, no prefix": {"sizes": [1], "prefixes": [0]},
    "odd sizes": {"sizes": [5, 1, 9], "prefixes": [7, 0, 130]},
    "more nodes than a word": {"sizes": [70, 3], "prefixes": [64, 65]},
    "several splits": {"sizes": [4, 9], "prefixes": [300, 128]},
    "one head per key": {"sizes": [6], "prefixes": [20], "heads": (3, 3)},
    "three heads per key": {"sizes": [6, 2], "prefixes": [20, 3], "heads": (9, 3), "head_dim": 64},
    "head dimension 24": {"sizes": [6], "prefixes": [20], "head_dim": 24},
    "head dimension 80": {"sizes": [6], "prefixes": [70], "head_dim": 80},
    "head dimension 256": {"sizes": [3], "prefixes": [70], "head_dim": 256},
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    # Several splits without prefixes of thousands of tokens, which take the interpreter minutes.
    if IS_ON:
        monkeypatch.setattr("jetflow.kernels.tree_attention_triton.SPLIT", 128)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 256])
def test_kernel_equals_the_twin(name, dtype, page_size):
    if page_size not in (None, 16) and name not in ("odd sizes", "more nodes than a word"):
        pytest.skip("page sizes are tested on two shapes")
    arguments, given = make_case(**KERNEL_CASES[name], dtype=dtype, page_size=page_size)
    check(arguments, given, {})


@interpreted
@cases
@pytest.mark.parametrize("page_size", [None, 16])
def test_kernel_honours_every_setting(settings, page_size):
    arguments, given = make_case([5, 1, 70], [7, 0, 150], page_size=page_size)
    check(arguments, given, settings)


@interpreted
def test_any_strides():
    arguments, given = make_case([5, 3], [7, 20])
    query, key, value, *rest = arguments
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    key = key.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    value = torch.stack([value, value], dim=-1)[..., 0]
    check((query, key, value, *rest), given, {})


@interpreted
def test_a_node_that_sees_nothing_gets_zeros():
    arguments, given = make_case([3], [0])
    arguments[3][1] = 0
    out, lse = tree_attention(*arguments, **given)
    assert not out[1].any()
    assert (lse[1] == float("-inf")).all()
    check(arguments, given, {})


@interpreted
def test_a_row_does_not_depend_on_its_neighbours():
    arguments, given = make_case([9, 4], [300, 40])
    both, _ = tree_attention(*arguments, **given)
    query, key, value, bits, _, prefixes, depths = arguments
    starts = torch.tensor([0, 4], dtype=torch.int32)
    alone, _ = tree_attention(
        query[9:], key[1:], value[1:], bits[9:], starts, prefixes[1:], depths[9:], max_nodes=9, max_prefix=300
    )
    assert torch.equal(both[9:], alone)


@interpreted
def test_kernel_has_no_gradient_and_says_so():
    arguments, given = make_case([3], [5], spare=0.0)
    query = arguments[0].requires_grad_()
    out, _ = tree_attention(query, *arguments[1:], **given)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()


@interpreted
def test_kernel_is_an_op_that_torch_compile_keeps_whole():
    arguments, given = make_case([3, 2], [5, 9])
    expected, _ = tree_attention(*arguments, **given)

    def twice(*tensors):
        return tree_attention(*tensors, **given)[0] * 2

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), expected * 2)
    torch.library.opcheck(
        torch.ops.jetflow.tree_attention.default,
        (*arguments, given["max_nodes"], given["max_prefix"], None, 0.25, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )


class Allocations(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes, views of others left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        self.sizes += [one.numel() for one in made if one.untyped_storage().data_ptr() not in given]
        return out


@pytest.mark.parametrize("page_size", [None, 16])
def test_no_mask_of_nodes_by_keys_is_ever_made(monkeypatch, page_size):
    """A tree of 256 nodes over 32k tokens: from its parents to the launch, nothing but the outputs and the parts of splits."""
    pytest.importorskip("triton", reason="kernels need triton")
    from jetflow.kernels import tree_attention_triton

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    monkeypatch.setattr(tree_attention_triton, "SPLIT", 2048)
    for name in ("_attend", "_combine"):
        monkeypatch.setattr(tree_attention_triton, name, Nothing())
    nodes, prefix, (heads, dim) = 256, 32768, (8, 64)
    slots = prefix + nodes
    memory = torch.empty(1, 2, slots, dim) if page_size is None else torch.empty(slots // page_size, page_size, 2, dim)
    table = None if page_size is None else torch.arange(slots // page_size, dtype=torch.int32)[None]
    query, parents = torch.empty(nodes, heads, dim), torch.arange(-1, nodes - 1)[None]
    starts, prefixes = (torch.tensor(one, dtype=torch.int32) for one in ([0, nodes], [prefix]))
    depths = torch.arange(nodes, dtype=torch.int32)
    given = {"max_nodes": nodes, "max_prefix": prefix, "block_table": table}
    # The wrapper first, which sees the op as one step; then what the op itself makes.
    with Allocations() as outside:
        tree_attention(query, memory, memory, pack_ancestors(parents)[0], starts, prefixes, depths, **given)
    with Allocations() as inside:
        tree_attention_triton.launch_tree_attention(
            query, memory, memory, pack_ancestors(parents)[0], starts, prefixes, depths, nodes, prefix, table, 0.125, None, None
        )
    splits = prefix // tree_attention_triton.SPLIT
    assert max(inside.sizes) == splits * nodes * heads * dim
    # The bits come from a mask of nodes by nodes, one row and column larger while it is made.
    packing = (nodes + 1) ** 2
    assert max(outside.sizes) <= max(packing, nodes * heads * dim)
    assert packing < nodes * prefix // 64


def check(arguments, given, settings):
    """The kernel may be at most twice as wrong as PyTorch's own attention in the same precision."""
    out, lse = tree_attention(*arguments, **given, **settings)
    exact = [one.float() if one.is_floating_point() else one for one in arguments]
    expected, expected_lse = tree_attention_reference(*exact, **given, **settings)
    assert not out.isnan().any()
    allowed = 2 * sdpa_error(arguments, given, settings) + 1e-6
    assert (out.float() - expected).abs().max() <= allowed
    torch.testing.assert_close(lse, expected_lse, atol=2e-3 if out.dtype == torch.float16 else TOLERANCE, rtol=1e-4)


def sdpa_error(arguments, given, settings):
    """Error of scaled_dot_product_attention in the dtype of the case against float32, where it can compute the case."""
    query, key, value, bits, starts, prefixes, _ = arguments
    floor = 1e-5 if query.dtype == torch.float32 else 2e-3
    if settings.get("window") or settings.get("softcap") or "block_table" in given:
        return floor
    worst = floor
    for row, prefix in enumerate(prefixes.tolist()):
        first, last = int(starts[row]), int(starts[row + 1])
        group = query.shape[1] // key.shape[1]
        keys, values = (one[row, :, : prefix + last - first].repeat_interleave(group, 0) for one in (key, value))
        seen = torch.cat([torch.ones(last - first, prefix, dtype=torch.bool), unpack_bits(bits[first:last], last - first)], 1)
        results = [
            scaled_dot_product_attention(
                query[first:last].transpose(0, 1).to(kind), keys.to(kind), values.to(kind), attn_mask=seen,
                scale=settings.get("scale"),
            )
            for kind in (query.dtype, torch.float32)
        ]  # fmt: skip
        worst = max(worst, (results[0].float() - results[1]).abs().nan_to_num().max().item())
    return worst


def test_kernels_under_the_interpreter():
    run_in_interpreter(__file__, "-k", "kernel or strides or nothing or neighbours")
