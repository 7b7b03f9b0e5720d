"""The drafter that goes with a head of either kind."""

from __future__ import annotations

from torch import Tensor

from jetflow.drafters.eagle import EagleDrafter
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.eagle_head import EagleHead
from jetflow.protocols import TreeExpander
from jetflow.targets import Target
from jetflow.trees.sampling import ChildSampling


def head_drafter(
    head: BlockDraftHead | EagleHead,
    target: Target,
    expander: TreeExpander | None = None,
    *,
    vocabulary: Tensor | None = None,
    passes: int = 1,
    sampling: ChildSampling | None = None,
) -> ParallelDrafter | EagleDrafter:
    """Returns a `ParallelDrafter` for a JetFlow or DFlash head, an `EagleDrafter` for an EAGLE-3 head.

    Args:
        head: what `load_head` returned.
        target: the frozen model.
        expander: how trees are built; best-first when absent.
        vocabulary: int64 [R], see `ParallelDrafter`.
        passes: of the head per tree, see `ParallelDrafter`.
        sampling: draw the children.

    Raises:
        ValueError: as for the drafters, or `vocabulary` or several `passes` are given for an EAGLE-3 head.

    Example:
        >>> drafter = head_drafter(load_head("models/tiny/head"), target)  # doctest: +SKIP
    """
    if isinstance(head, BlockDraftHead):
        return ParallelDrafter(head, target, expander, vocabulary=vocabulary, passes=passes, sampling=sampling)
    if vocabulary is not None:
        raise ValueError(f"vocabulary must be None for an EAGLE-3 head, which has its own; got {len(vocabulary)} tokens")
    if passes != 1:
        raise ValueError(f"passes must be 1 for an EAGLE-3 head, which takes one step per level; got {passes}")
    return EagleDrafter(head, target, expander, sampling=sampling)
