"""Question: how do I say who may attend to whom, and what does a mask rule of my own look like?

Command:  python examples/tutorials/masks.py
Run time: seconds on a CPU
Expected: masks as tables; the own rule equals its definition in plain loops, and attention takes it
"""

# --8<-- [start:training]
import torch

from jetflow import TokenTree, masks


def show(rule, queries, keys):
    for row in masks.dense(rule, batch=1, num_heads=1, q_len=queries, kv_len=keys)[0, 0].tolist():
        print(" ".join("x" if allowed else "." for allowed in row))


# Seven positions of context; blocks of three hang off positions 2 and 5.
anchors = torch.tensor([[2, 5]])
print("JetFlow, causal in the block:")
show(masks.anchor_blocks(anchors, block_size=3, context_len=7, causal=True), queries=6, keys=13)
print("DFlash, all of the block:")
show(masks.anchor_blocks(anchors, block_size=3, context_len=7, causal=False), queries=6, keys=13)
# --8<-- [end:training]

# --8<-- [start:tree]
tree = TokenTree.from_parents([[5, 7, 8, 9]], [[-1, 0, 0, 1]])
print("a tree behind three committed tokens:")
show(masks.tree_causal(tree, prefix_lens=torch.tensor([3])), queries=4, keys=7)
# --8<-- [end:tree]


# --8<-- [start:own]
def first_positions(count):
    """Everybody sees the first `count` positions: attention sinks."""

    def rule(b, h, q_idx, kv_idx):
        return (kv_idx < count) & (kv_idx <= q_idx)

    return rule


streaming = masks.or_masks(first_positions(2), masks.sliding_window(3))
print("the first two positions and the last three:")
show(streaming, queries=8, keys=8)
# --8<-- [end:own]

# --8<-- [start:check]
mask = masks.dense(streaming, batch=1, num_heads=1, q_len=8, kv_len=8)
for q in range(8):
    for k in range(8):
        assert mask[0, 0, q, k] == (k <= q and (k < 2 or k > q - 3)), (q, k)

states = torch.randn(1, 4, 8, 16)
out = torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
print("as plain loops say; attention gives", list(out.shape))
# --8<-- [end:check]
