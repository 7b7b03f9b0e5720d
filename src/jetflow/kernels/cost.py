"""What a call of a kernel has to move and to compute: the floor that its time is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetflow.kernels.tree_attention import SPLIT


class Cost(NamedTuple):
    """Bytes read and written once, and floating-point operations."""

    num_bytes: int
    num_flops: int

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Time on a machine that moves and computes at these rates at once (roofline)."""
        return max(self.num_bytes / bytes_per_second, self.num_flops / flops_per_second)


def tree_attention_cost(
    num_nodes: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int = 2,
    split: int = SPLIT,
) -> Cost:
    """Cost of one layer's tree attention.

    Keys and values are read once per key-value head, whatever the number of query heads and nodes; queries are read and
    outputs written once; visibility is one word per 64 nodes; rows of several splits also write and read float32 parts.

    Args:
        num_nodes: nodes of each row.
        prefix_lens: committed tokens of each row.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: dimension of a head.
        element_size: bytes of one element.
        split: prefix keys of a split.

    Example:
        >>> tree_attention_cost([1], [0], num_heads=1, num_kv_heads=1, head_dim=16, element_size=4).num_flops
        64
    """
    num_bytes = num_flops = 0
    for nodes, prefix in zip(num_nodes, prefix_lens, strict=True):
        keys = prefix + nodes
        num_bytes += 2 * keys * num_kv_heads * head_dim * element_size
        num_bytes += 2 * nodes * num_heads * head_dim * element_size
        num_bytes += nodes * -(-nodes // 64) * 8 + nodes * num_heads * 4
        splits = max(1, -(-prefix // split))
        if splits > 1:
            num_bytes += 2 * splits * nodes * num_heads * (head_dim + 1) * 4
        # Two products of 2 * D operations per pair of node and key, for every query head.
        num_flops += 4 * nodes * keys * num_heads * head_dim
    return Cost(num_bytes, num_flops)
