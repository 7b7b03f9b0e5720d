"""Typical acceptance, for comparison with the lossless rules.

Dimension key: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.acceptors.target_law import TargetLaw, check_logits, draw, has_law
from jetflow.acceptors.traversal import path_to
from jetflow.protocols import Acceptance
from jetflow.trees.token_tree import TokenTree


class TypicalAcceptance:
    """NOT lossless: accepts every child that the target finds typical, so the text does not follow the target's law.

    A child x is accepted when p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of the target's law; of all paths of
    accepted nodes the longest is kept, the first one where several are. Medusa (arXiv 2401.10774), section 2.3.1.

    Args:
        temperature: softmax temperature of the target, above 0.
        epsilon: a probability that is always enough.
        delta: scales the threshold of flat laws; the square root of epsilon when absent, as in Medusa.

    Raises:
        ValueError: `epsilon` or `delta` is not in (0, 1), or as for `TargetLaw`.
    """

    def __init__(self, temperature: float = 1.0, *, epsilon: float = 0.09, delta: float | None = None):
        delta = epsilon**0.5 if delta is None else delta
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value}")
        self.temperature = temperature
        self._law = TargetLaw(temperature)
        self._epsilon, self._delta = epsilon, delta

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance:
        """Walks all rows at once; arguments and result as for `SamplingAcceptor`."""
        check_logits(tree, logits)
        target = self._law(logits.flatten(0, 1)).view(logits.shape)
        entropy = torch.special.entr(target).sum(-1)
        thresholds = (self._delta * (-entropy).exp()).clamp(max=self._epsilon)
        above = tree.parents.clamp(min=0)
        probs = target.gather(1, above[:, :, None].expand(-1, -1, target.shape[2])).gather(2, tree.tokens[:, :, None])[..., 0]
        typical = (probs > thresholds.gather(1, above)) & tree.node_mask
        typical[:, 0] = True
        # A node is reached when it and all its ancestors are typical.
        reached = (tree.ancestor_mask() <= typical[:, None, :]).all(-1) & tree.node_mask
        end = torch.where(reached, tree.depths, -1).argmax(-1)
        every = torch.arange(tree.batch_size, device=logits.device)
        usable = (has_law(logits) | ~tree.node_mask).all(-1)
        bonus = torch.where(usable, draw(target[every, end], generator), -1)
        return Acceptance(path_to(tree, end), tree.depths[every, end], bonus)
