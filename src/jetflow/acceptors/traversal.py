"""Traversal verification: from the leaves to the root, with the weight of whole paths.

Everything that is visited before the first accepted node was rejected, so the weight with which each node would be
accepted, given that, is no matter of chance: all weights are computed at once, from the root down, and then the first node
in post-order that passes its draw ends the search.

Dimension key: B batch, N nodes, M nodes of one level and rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.acceptors.target_law import DrawnTree, TargetLaw, check_logits, draw, has_law, uniform, without
from jetflow.protocols import Acceptance
from jetflow.trees.token_tree import TokenTree


class TraversalVerification:
    """Tries the deepest nodes first, so that a path is kept or dropped as a whole. Lossless.

    Weng et al., "Traversal Verification for Speculative Tree Decoding" (arXiv 2505.12398, NeurIPS 2025), for children drawn
    without replacement. On a chain it is block verification; it never accepts less than recursive rejection. A fixed child
    (one that the draft's law could not have drawn) is followed where the token drawn from what is left is it.

    Args:
        temperature: softmax temperature of the target, above 0.
        top_k: keep this many most likely tokens of the target's law.
        top_p: keep the smallest set of tokens with at least this probability.

    Raises:
        ValueError: as for `TargetLaw`.
    """

    def __init__(self, temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None):
        self.temperature = temperature
        self._law = TargetLaw(temperature, top_k=top_k, top_p=top_p)

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Traverses all rows at once; arguments and result as for `SamplingAcceptor`."""
        check_logits(tree, logits)
        drawn = DrawnTree(tree, logits.shape[2])
        weights, left = acceptance_weights(tree, drawn, self._law(logits.flatten(0, 1)).view(logits.shape))
        turns = _post_order(tree, drawn)
        every = torch.arange(tree.batch_size, device=logits.device)
        # The segment of a node: what hangs together through drawn children, named by its top.
        tops = _segment_tops(tree, drawn)
        start, bonus = torch.zeros_like(every), torch.full_like(every, -1)
        end, moving = torch.zeros_like(every), torch.ones_like(every, dtype=torch.bool)
        while bool(moving.any()):
            passes = (uniform(weights, generator) < weights) | (every.new_tensor(range(tree.max_nodes)) == start[:, None])
            passes &= (tops == start[:, None]) & tree.node_mask
            first = torch.where(passes, turns, tree.max_nodes).argmin(-1)
            end = torch.where(moving, first, end)
            tokens = draw(left[every, end], generator)
            following = drawn.fixed_child(end, tokens)
            bonus = torch.where(moving, tokens, bonus)
            moving &= following >= 0
            start = torch.where(moving, following, start)
        usable = (has_law(logits) | ~tree.node_mask).all(-1)
        return Acceptance(path_to(tree, end), tree.depths.gather(1, end[:, None])[:, 0], torch.where(usable, bonus, -1))


class BlockVerification(TraversalVerification):
    """Verifies a drawn chain as a whole: the longest prefix that passes is kept. Lossless.

    Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444, ICLR 2025), which traversal
    verification is on a chain: never fewer accepted tokens than token by token.

    Raises:
        ValueError: as for `TargetLaw`, and from a call with a tree that is no chain of drawn tokens.
    """

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Verifies all rows at once; arguments and result as for `SamplingAcceptor`."""
        chain = torch.arange(tree.max_nodes, device=tree.parents.device) - 1
        wrong = ((tree.parents != chain) | ~DrawnTree(tree, logits.shape[-1]).drawn)[:, 1:] & tree.node_mask[:, 1:]
        if bool(wrong.any()):
            node = int(wrong.any(0).int().argmax()) + 1
            raise ValueError(f"tree must be a chain of drawn tokens, but node {node} is not the drawn child of the one before")
        return super().__call__(tree, logits, generator=generator)


def acceptance_weights(tree: TokenTree, drawn: DrawnTree, target: Tensor) -> tuple[Tensor, Tensor]:
    """Computes with which probability each node is accepted once all that is visited before it was rejected.

    Args:
        tree: trees [B, N].
        drawn: their drawn children.
        target: p behind each node, float32 [B, N, V].

    Returns:
        Weights float64 [B, N], 1 for roots and fixed children that were not followed by rejections, and what is then left of
        the target's law, float32 [B, N, V].
    """
    left = target.clone()
    weights = torch.ones(tree.tokens.shape, dtype=torch.float64, device=target.device)
    for depth in range(int(tree.depths.max()) + 1):
        rows, nodes = ((tree.depths == depth) & tree.node_mask & (drawn.children >= 0).any(-1)).nonzero(as_tuple=True)
        law = drawn.draft_law(rows, nodes)
        for rank in range(drawn.children.shape[2]):
            places = (drawn.children[rows, nodes, rank] >= 0).nonzero()[:, 0]
            if not len(places):
                continue
            row, node = rows[places], nodes[places]
            child = drawn.children[row, node, rank]
            tokens = tree.tokens[row, child]
            old, part = weights[row, node], law[places]
            target_probs = left[row, node].gather(1, tokens[:, None])[:, 0].double()
            draft_probs = part.gather(1, tokens[:, None])[:, 0].double()
            weights[row, child] = torch.where(draft_probs > 0, old * target_probs / draft_probs, 0.0).clamp(max=1.0)
            # The child rejected: what is left of the weight and of the law.
            surplus = (old[:, None].float() * left[row, node] - part).clamp(min=0.0)
            total = surplus.sum(-1)
            whole = total.double() + 1.0 - old
            weights[row, node] = torch.where(total > 0, total.double() / whole, (old >= 1.0).double())
            left[row, node] = torch.where(total[:, None] > 0, surplus / total[:, None], target[row, node])
            law[places] = without(part, tokens)
    return weights, left


def _post_order(tree: TokenTree, drawn: DrawnTree) -> Tensor:
    """Turn of each node in post-order, children in the order of their draws, int64 [B, N]."""
    ancestors = tree.ancestor_mask() & tree.node_mask[:, None, :]
    sizes = ancestors.sum(1)
    # Nodes whose subtrees are visited before that of a node: earlier siblings of it and of its ancestors.
    before, visited = torch.zeros_like(tree.parents), torch.zeros_like(tree.parents)
    for rank in range(drawn.children.shape[2]):
        child = drawn.children[:, :, rank]
        exists = child >= 0
        place = child.clamp(min=0)
        before.scatter_add_(1, place, torch.where(exists, visited, 0))
        visited = visited + torch.where(exists, sizes.gather(1, place), 0)
    above = torch.einsum("bij,bj->bi", ancestors.double(), before.double()).long()
    return above + sizes - 1


def _segment_tops(tree: TokenTree, drawn: DrawnTree) -> Tensor:
    """For each node its nearest ancestor, itself included, that was not drawn, int64 [B, N]."""
    places = torch.arange(tree.max_nodes, device=tree.parents.device).expand_as(tree.parents)
    tops = torch.where(drawn.drawn, tree.parents.clamp(min=0), places)
    for _ in range(max(1, (tree.max_nodes - 1).bit_length())):
        tops = tops.gather(1, tops)
    return tops


def path_to(tree: TokenTree, ends: Tensor) -> Tensor:
    """The nodes from the root to `ends` [B], int64 [B, P]; the last one is repeated."""
    length = int(tree.depths.gather(1, ends[:, None]).max()) + 1
    steps = [ends]
    for _ in range(length - 1):
        steps.append(tree.parents.gather(1, steps[-1][:, None])[:, 0].clamp(min=0))
    backwards = torch.stack(steps, dim=1)
    depth = tree.depths.gather(1, ends[:, None])
    places = (depth - torch.arange(length, device=ends.device)).clamp(min=0)
    return backwards.gather(1, places)
