"""Recursive rejection: from the root down, each child is tried against the law that it was drawn from.

P is the target's law, Q the draft's; both change as children are rejected.

Dimension key: B batch, M rows still trying, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.acceptors.target_law import DrawnTree, TargetLaw, check_logits, draw, has_law, residual, uniform, without
from jetflow.protocols import Acceptance
from jetflow.trees.token_tree import TokenTree


class RecursiveRejection:
    """Accepts a drawn child x with probability min(1, P(x) / Q(x)); a rejection leaves norm((P - Q)+). Lossless.

    Children are tried in the order of their draws. After all were rejected the token is drawn from what is left of P, and
    followed where it is a fixed child (one that Q could not have drawn): with fixed children alone this is the match rule,
    with one drawn child beside them the residual match of Hu et al. (arXiv 2502.18779, ICLR 2025), the best rule for such a
    set.

    Args:
        temperature: softmax temperature of the target, above 0.
        top_k: keep this many most likely tokens of the target's law.
        top_p: keep the smallest set of tokens with at least this probability.
        replacement: take the children for the different ones among draws with replacement, as SpecInfer does
            (arXiv 2305.09781); without, as Sequoia does (arXiv 2402.12374), Q loses each rejected token, which never accepts
            less.

    Raises:
        ValueError: as for `TargetLaw`.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        replacement: bool = False,
    ):
        self.temperature = temperature
        self._law = TargetLaw(temperature, top_k=top_k, top_p=top_p)
        self._replacement = replacement

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Walks all rows at once; arguments and result as for `SamplingAcceptor`."""
        check_logits(tree, logits)
        drawn = DrawnTree(tree, logits.shape[2])
        every = torch.arange(tree.batch_size, device=logits.device)
        node, bonus = torch.zeros_like(every), torch.full_like(every, -1)
        path, moving = [node], torch.ones_like(every, dtype=torch.bool)
        usable = moving.clone()
        while True:
            rows = every[moving]
            here = logits[rows, node[rows]]
            accepted, left = self._try_children(drawn, tree, rows, node[rows], self._law(here), generator)
            # Where all were rejected, the token comes from what is left, and may be a fixed child.
            tokens = draw(left, generator)
            candidates, chosen = torch.full_like(every, -1), torch.full_like(every, -1)
            chosen[rows] = torch.where(accepted < 0, tokens, -1)
            candidates[rows] = accepted
            following = torch.where(candidates < 0, drawn.fixed_child(node, chosen), candidates)
            stopping = moving & (following < 0)
            # A law that is missing anywhere on the path spoils the row.
            usable[rows] &= has_law(here)
            bonus = torch.where(stopping & usable, chosen, bonus)
            moving = moving & (following >= 0)
            if not bool(moving.any()):
                break
            node = torch.where(moving, following, node)
            path.append(node)
        nodes = torch.stack(path, dim=1)
        return Acceptance(nodes, tree.depths.gather(1, nodes[:, -1:])[:, 0], bonus)

    def _try_children(
        self,
        drawn: DrawnTree,
        tree: TokenTree,
        rows: Tensor,
        nodes: Tensor,
        target: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the accepted child [M] of each node, -1 where none is, and what is left of the target's law [M, V]."""
        children = drawn.children[rows, nodes]
        accepted, left = torch.full_like(nodes, -1), target.clone()
        law, seen = drawn.draft_law(rows, nodes), torch.zeros(len(nodes), dtype=torch.float64, device=nodes.device)
        for rank in range(children.shape[1]):
            active = ((children[:, rank] >= 0) & (accepted < 0)).nonzero()[:, 0]
            if not len(active):
                continue
            child = children[active, rank]
            tokens = tree.tokens[rows[active], child]
            if self._replacement:
                left[active] = self._repeated(left[active], law[active], seen[active], generator)
            target_probs = left[active].gather(1, tokens[:, None])[:, 0].double()
            draft_probs = law[active].gather(1, tokens[:, None])[:, 0].double()
            passes = uniform(draft_probs, generator) * draft_probs < target_probs
            accepted[active[passes]] = child[passes]
            failed = active[~passes]
            left[failed] = residual(left[failed], law[failed])
            if self._replacement:
                seen[active] += draft_probs
            else:
                law[failed] = without(law[failed], tokens[~passes])
        return accepted, left

    def _repeated(self, left: Tensor, law: Tensor, seen: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws that bring a token rejected before: P has nothing on it, so it is rejected again and P changes once more.

        Before a draw that brings a new token there is a geometric number of them.
        """
        seen = seen.clamp(0.0, 1.0 - 1e-12)
        counts = (torch.log1p(-uniform(seen, generator)) / seen.clamp(min=1e-300).log()).floor()
        return repeated_residual(left, law, torch.where(seen > 0, counts, 0.0))


def repeated_residual(target: Tensor, draft: Tensor, counts: Tensor) -> Tensor:
    """Applies `P <- norm((P - Q)+)` so many times to each row, without doing it so often.

    After any number of steps P is proportional to (P_0 - c Q)+, and a step adds the sum of that to c. While the same tokens
    are left, that sum shrinks by 1 minus Q's mass on them each time, so all steps up to the next token's end are one jump.

    Args:
        target: P_0, float [M, V].
        draft: Q, float [M, V].
        counts: float64 [M], steps of each row.
    """
    start, law, counts = target.double(), draft.double(), counts.clone()
    ratios = torch.where(law > 0, start / law, torch.inf).masked_fill(start <= 0, -torch.inf)
    best = ratios.amax(-1)
    level = torch.zeros_like(counts)
    while bool((counts > 0).any()):
        alive = ratios > level[:, None]
        total = (start - level[:, None] * law).clamp(min=0.0).sum(-1)
        mass = (law * alive).sum(-1)
        next_end = ratios.masked_fill(~alive, torch.inf).amin(-1)
        # Where Q misses what is left, or all of it ends at once, the shape of P stays.
        still = (mass <= 0) | (next_end >= best) | (total <= 0)
        shrink = torch.log1p(-mass.clamp(max=1.0 - 1e-15))
        needed = (torch.log1p((-(next_end - level) * mass / total).clamp(min=-1.0)) / shrink).ceil().clamp(min=1.0)
        steps = torch.where(still, 0.0, torch.minimum(needed, counts))
        grown = total * -torch.expm1(steps * shrink) / mass
        level = torch.where(still, level, level + grown)
        counts = torch.where(still, 0.0, counts - steps)
    left = (start - level[:, None] * law).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, start).to(target.dtype)
