"""Ancestor bits against the rule written as loops."""

import pytest
import torch

from jetflow.kernels.ancestors import pack_ancestors, pack_bits, unpack_bits


def random_parents(batch, nodes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, nodes), -1)
    for row in range(batch):
        for node in range(1, nodes):
            parents[row, node] = int(torch.randint(node, (1,), generator=generator))
    return parents


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 130])
def test_bits_are_the_ancestors_and_the_node_itself(nodes):
    parents = random_parents(2, nodes)
    parents[1, nodes // 2 + 1 :] = -1
    words = pack_ancestors(parents)
    assert words.shape == (2, nodes, -(-nodes // 64))
    for row in range(2):
        for node in range(nodes):
            above, current = set(), node
            while current >= 0:
                above.add(current)
                current = int(parents[row, current])
            found = {
                word * 64 + bit for word in range(words.shape[2]) for bit in range(64) if words[row, node, word] >> bit & 1
            }
            assert found == above


def test_packing_and_unpacking_are_inverse():
    visible = torch.rand(3, 5, 100, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[..., 63] = True
    assert torch.equal(unpack_bits(pack_bits(visible), 100), visible)


def test_draft_blocks_are_special_trees():
    chain = torch.arange(-1, 15)[None]
    everything = torch.ones(16, 16, dtype=torch.bool)
    assert torch.equal(pack_bits(everything.tril()), pack_ancestors(chain)[0])
    assert unpack_bits(pack_bits(everything), 16).all()


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"parents must be int64 \[B, N\], got torch.int32"):
        pack_ancestors(torch.zeros(1, 2, dtype=torch.int32))
