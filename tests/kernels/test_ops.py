"""The kernels as ops: torch.compile keeps them whole, fake kernels tell the shapes, and gradients are refused."""

import pytest
import torch
from interpreter import interpreted, run_in_interpreter
from test_small_kernels import random_trees
from test_tree_attention import make_case

from jetflow.kernels.commit import commit_path
from jetflow.kernels.expand import expand_tree
from jetflow.kernels.top_tokens import top_tokens
from jetflow.kernels.tree_attention import tree_attention
from jetflow.kernels.walk import accept_walk


def attention_case(page_size=None):
    arguments, given = make_case([3, 2], [5, 9], page_size=page_size)
    if page_size is None:
        return (lambda *tensors: tree_attention(*tensors, **given)), arguments
    arguments = (*arguments, given.pop("block_table"))
    return (lambda *tensors: tree_attention(*tensors[:-1], block_table=tensors[-1], **given)), arguments


def top_case():
    return (lambda logits: top_tokens(logits, 4)), (torch.randn(2, 50),)


def walk_case():
    tree = random_trees(2, 5, 30, torch.Generator().manual_seed(0))
    chosen = tree.tokens.roll(1, dims=1)
    return (lambda *tensors: accept_walk(*tensors, 3)), (tree.tokens, tree.parents, tree.num_nodes, chosen)


def expand_case():
    log_probs = torch.randn(2, 3, 4, 4).log_softmax(-1).sort(-1, descending=True).values
    columns, tokens = torch.randint(4, log_probs.shape), torch.rand(2, 3, 4, 20).argsort(-1)[..., :4]
    return (lambda *tensors: expand_tree(*tensors, 9)), (torch.tensor([3, 4]), tokens, log_probs, columns)


def commit_case():
    def commit(memory, path, starts, counts):
        commit_path(memory, path, starts, counts)
        return memory * 2, path

    path, starts, counts = torch.tensor([[0, 2]]), torch.tensor([3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    return commit, (torch.randn(2, 1, 1, 8, 4), path, starts, counts)


CASES = {
    "attention": attention_case,
    "attention over pages": lambda: attention_case(4),
    "top tokens": top_case,
    "walk": walk_case,
    "expansion": expand_case,
    "commit": commit_case,
}


@interpreted
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_torch_compile_keeps_the_op_whole(name, backend):
    torch.manual_seed(0)
    call, tensors = CASES[name]()
    expected = call(*(one.clone() for one in tensors))
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    given = [one.clone() for one in tensors]
    for one, other in zip(compiled(*given), expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)
    if name == "commit":
        # What is changed in place is changed for the caller, too.
        assert torch.equal(given[0] * 2, expected[0])


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_fake_kernels_give_shapes_and_dtypes(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, tensors = CASES[name]()
    expected = call(*(one.clone() for one in tensors))
    with FakeTensorMode() as mode:
        found = call(*(mode.from_tensor(one) for one in tensors))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@interpreted
@pytest.mark.parametrize("name", ["attention", "attention over pages", "top tokens", "expansion"])
def test_gradients_are_refused(name):
    call, tensors = CASES[name]()
    tensors = [one.nan_to_num().requires_grad_() if one.is_floating_point() else one for one in tensors]
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        sum(one.sum() for one in call(*tensors) if one.is_floating_point()).backward()


def test_memory_with_gradients_is_refused():
    call, (memory, *rest) = commit_case()
    # An op without outputs would change it behind the back of the backward pass.
    with pytest.raises(ValueError, match="memory must not require gradients, as a commit has none"):
        call(memory.requires_grad_() * 1, *rest)


def test_ops_in_the_interpreter():
    run_in_interpreter(__file__)
