"""The expected acceptance length of the tree that is served, as a loss.

Dimension key: D depths of a block, V vocabulary, B budget.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetflow.losses.divergences import IGNORED_LABEL, both_log_probs

# Score of nodes that do not exist: below every path, and finite, so that gradients are.
NOWHERE = -1e30
LOG_PROB_FLOOR = -1e4


class TreeAcceptance:
    """The share of its depths that a block's best tree does not follow the target to, one value per depth.

    The best tree T of B nodes holds the paths of highest probability q under the draft's laws of a block (`BestFirst`).
    Its expected acceptance length is `1 + sum of P(u) over the drafted nodes u of T`, P being the target's law. For the
    path y of a block, written by the target,

        1 + sum_d sum_v p_d(v | y_<d) [(y_<d, v) in T]

    has just this mean over y: the last token of each node is averaged exactly, only the path before it is a sample. A node
    is in T if its score is above the threshold t halfway between the last node in T and the first one outside. This loss
    puts a sigmoid in the place of the step, and is, at depth d,

        1 - sum_v p_d(v | y_<d) sigmoid((log q(y_<d) + log q_d(v) - t) / smoothness)

    so that with decreasing smoothness D less the block's sum becomes the expected number of accepted nodes. The threshold
    takes part in the gradient: what crowds the path out of the tree is pushed down. With temperature 0 the target's law is
    certain of the label, as in greedy text, and the sum has no variance at all.

    Far from the threshold gradients vanish, so a new head learns more slowly from it than from the divergences; `MixedLoss`
    puts another loss beside it. Laws behind other tokens than the labels are not known in training: for heads whose laws
    depend on the path, those behind the labels stand for them in t.

    Args:
        budget: B, nodes of the tree, root included; at least 2.
        temperature: of the target's law; the one that will be decoded with. 0 for greedy text.
        smoothness: width of the sigmoid in nats.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> draft = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
        >>> TreeAcceptance(3, smoothness=1e-3)(draft, None, torch.tensor([[0, 0]]))
        tensor([[0., 0.]])
        >>> TreeAcceptance(3, smoothness=1e-3)(draft, None, torch.tensor([[1, 0]]))
        tensor([[1., 1.]])
    """

    uses_path = True

    def __init__(self, budget: int, *, temperature: float = 0.0, smoothness: float = 1.0):
        if budget < 2:
            raise ValueError(f"budget must be at least 2 (the root and one drafted node), got {budget}")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be 0 or a finite number above, got {temperature}")
        if not 0 < smoothness < math.inf:
            raise ValueError(f"smoothness must be a finite number above 0, got {smoothness}")
        self.budget, self.temperature, self.smoothness = budget, temperature, smoothness
        self.uses_target = temperature > 0

    def __call__(self, draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        """Compares the tree of each block with the target's law along the labels.

        Args:
            draft_logits: float [..., D, V], the depths of each block in order.
            target_logits: float [..., D, V]; None is enough at temperature 0.
            labels: int64 [..., D], the target's path; -100 where ignored. Such depths do not exist for the tree, and all
                that follow in a block must be ignored, too.

        Returns:
            float32 [..., D], in [0, 1]; 0 where ignored.

        Raises:
            ValueError: shapes or dtypes do not fit, or the target's logits are missing.
        """
        if target_logits is None and self.uses_target:
            raise ValueError(f"target_logits must be given at temperature {self.temperature}, got None")
        ignored = labels == IGNORED_LABEL
        known = draft_logits if target_logits is None else target_logits
        log_probs, target_log_probs = both_log_probs(
            draft_logits, known, labels, 1.0, target_temperature=self.temperature if self.uses_target else 1.0
        )
        log_probs = log_probs.clamp(min=LOG_PROB_FLOOR)
        own = log_probs.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0].masked_fill(ignored, 0.0)
        ends = own.cumsum(-1)
        threshold = tree_threshold(log_probs, ~ignored, self.budget)[..., None]
        if self.uses_target:
            scores = (ends - own)[..., None] + log_probs - threshold[..., None]
            inside = (target_log_probs.exp() * (scores / self.smoothness).sigmoid()).sum(-1)
        else:
            inside = ((ends - threshold) / self.smoothness).sigmoid()
        return (1.0 - inside).masked_fill(ignored, 0.0)


def tree_threshold(log_probs: Tensor, exists: Tensor, budget: int) -> Tensor:
    """Returns the score halfway between the last node of the best tree and the first one outside it.

    Args:
        log_probs: float [..., D, V], one law per depth, which all nodes of the depth before share.
        exists: bool [..., D], depths that there are; the first ones.
        budget: B, nodes of the tree, root included.

    Returns:
        float [...]; far below all scores where the tree holds every path.
    """
    best = log_probs.topk(min(budget, log_probs.shape[-1]), dim=-1).values.masked_fill(~exists[..., None], NOWHERE)
    level = best[..., 0, :]
    found = [level]
    for depth in range(1, best.shape[-2]):
        # A level can hold no more of the best `budget` scores than that many of its own best.
        scores = (level[..., :, None] + best[..., depth, None, :]).flatten(-2)
        level = scores.topk(min(budget, scores.shape[-1]), dim=-1).values
        found.append(level)
    scores = pad(torch.cat(found, dim=-1), (0, budget), value=NOWHERE)
    kept = scores.topk(budget, dim=-1).values
    # The root takes one of the nodes.
    return 0.5 * (kept[..., budget - 2] + kept[..., budget - 1])
