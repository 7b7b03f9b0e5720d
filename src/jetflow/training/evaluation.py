"""The truth about a head: tau of real decodes of held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.head import head_drafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.eagle_head import EagleHead
from jetflow.targets import Target


class TauReport(NamedTuple):
    """tau of one budget: tokens kept per target pass, over all rounds of all prompts. None when no round took place."""

    budget: int
    tau: float | None
    num_rounds: int
    num_tokens: int


def measure_tau(
    head: BlockDraftHead | EagleHead,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    budgets: Sequence[int],
    max_new_tokens: int,
    passes: int = 1,
) -> list[TauReport]:
    """Decodes prompts greedily with best-first trees of each budget.

    Args:
        head: the head, in the target's dtype.
        target: the model it drafts for.
        prompts: token ids of each prompt.
        budgets: nodes per tree, root included.
        max_new_tokens: most new tokens per prompt.
        passes: of the head per tree.

    Raises:
        ValueError: there are no prompts, head and target do not fit, or the head has no refinement for the passes.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    drafter = head_drafter(head, target, passes=passes)
    reports = []
    for budget in budgets:
        decoder = SpeculativeDecoder(target, drafter, budget=budget)
        results = [decoder.generate(list(ids), max_new_tokens=max_new_tokens) for ids in prompts]
        kept = [stats.num_kept for one in results for stats in one.rounds]
        tau = sum(kept) / len(kept) if kept else None
        reports.append(TauReport(budget, tau, len(kept), sum(len(one.token_ids) for one in results)))
    return reports
