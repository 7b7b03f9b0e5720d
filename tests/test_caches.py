import pytest
import torch

from jetflow.caches import MIN_CAPACITY, TreeCache


def make_cache(batch_size=2):
    return TreeCache(
        num_layers=2, num_kv_heads=1, head_dim=2, batch_size=batch_size, capacity=4, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def write(cache, values):
    """Writes one number per token as every component of keys, its negative as values, into all layers."""
    keys = torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 1, -1, 2)
    cache.reserve(keys.shape[2])
    return [cache.write(layer, keys, -keys) for layer in range(2)]


def row(states, index):
    return states[index, 0, :, 0].tolist()


def test_commit_gathers_the_path_and_not_the_first_slots():
    cache = make_cache()
    write(cache, [[1, 2, 3], [4, 5, 6]])
    cache.lengths = [3, 1]
    write(cache, [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    cache.commit(torch.tensor([[0, 2, 4], [0, 3, 3]]), [3, 2])
    assert cache.lengths == [6, 3]
    for keys, values in write(cache, [[30], [40]]):
        assert row(keys, 0) == [1, 2, 3, 10, 12, 14, 30]
        assert row(keys, 1)[:4] == [4, 20, 23, 40]
        assert torch.equal(values, -keys)


def test_growth_keeps_what_is_committed():
    cache = make_cache(1)
    write(cache, [list(range(MIN_CAPACITY))])
    cache.advance([MIN_CAPACITY])
    ((keys, _), _) = write(cache, [[-1.0]])
    assert row(keys, 0) == [*range(MIN_CAPACITY), -1]
    assert cache.capacity == 2 * MIN_CAPACITY


def test_reset_keeps_the_memory_and_forgets_the_tokens():
    cache = make_cache(1)
    write(cache, [[1, 2, 3]])
    cache.advance([3])
    cache.reset()
    ((keys, _), _) = write(cache, [[7]])
    assert row(keys, 0) == [7]


def test_layers_of_another_shape_are_refused():
    cache = make_cache(1)
    with pytest.raises(ValueError, match="layer 1 of the target has keys"):
        cache.write(1, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))


def test_unused_slots_never_reach_the_logits():
    """Rejected nodes and old texts stay in memory; poisoning them must change nothing."""
    from conftest import make_model

    from jetflow import Target, TokenTree, TreeVerifier

    verifier = TreeVerifier(Target(make_model("qwen3")))
    verifier.prefill(torch.tensor([[5, 9, 13]]), torch.tensor([3]))
    tree = TokenTree.from_parents([[4, 7, 8]], [[-1, 0, 0]])
    before = verifier.verify(tree).logits
    verifier.cache._storage[..., 3:, :] = 1e4
    assert torch.equal(verifier.verify(tree).logits, before)
