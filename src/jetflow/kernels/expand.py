"""Exact expansion on the device: the best tree of a budget from tables of laws, level by level, without reading anything back.

`expand_tree` runs in Triton, one program per row; `expand_tree_reference` is its plain PyTorch twin with the same signature.
Both settle equal scores as `trees.growth` does: lower depth, then lower parent, then lower rank.

Dimension key: B batch, D levels, R laws of a depth, K candidates of a law, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jetflow.trees.ranking import best_indices

# Most candidates of a level and most kept entries altogether that one program sorts, both as powers of two.
MAX_SORTED = 8192
NEVER = float("-inf")


class LawTables(NamedTuple):
    """Laws of all depths, [B, D, R, K] each; see `expand_tree`."""

    tokens: Tensor
    log_probs: Tensor
    columns: Tensor | None


class ExpansionSizes(NamedTuple):
    """Powers of two: nodes kept of a level, ranks of a law, candidates of a level, and kept entries of all levels."""

    keep: int
    ranks: int
    candidates: int
    entries: int


def expansion_sizes(levels: int, num_laws: int, width: int, budget: int) -> ExpansionSizes:
    """What a program has to sort for laws [B, levels, num_laws, width].

    Where all parents share one law, only pairs of slot s and rank r with (s + 1) * (r + 1) < budget can be kept. Of the ranks
    whose r + 1 lies in [2^j, 2^(j + 1)) that leaves budget / 2^j slots, so that each such group fits into `keep` places.
    """
    keep, ranks = _power_of_two(budget), _power_of_two(width)
    groups = min(keep.bit_length() - 1, width.bit_length()) if num_laws == 1 else ranks
    entries = sum(level_sizes(levels, width, budget)) - 1
    return ExpansionSizes(keep, ranks, max(keep, _power_of_two(keep * groups)), max(keep, _power_of_two(entries)))


def fits(log_probs: Tensor, budget: int) -> bool:
    """Whether the kernel takes laws [B, D, R, K] and a budget; what is larger takes the plain path."""
    _, levels, num_laws, width = log_probs.shape
    sizes = expansion_sizes(levels, num_laws, width, budget)
    return max(sizes.candidates, sizes.entries) <= MAX_SORTED


def level_sizes(levels: int, width: int, budget: int) -> list[int]:
    """Nodes that are kept of each level, the root's first."""
    sizes = [1]
    for level in range(1, levels + 1):
        sizes.append(min(budget - level, sizes[-1] * width))
    return sizes


def expand_tree(
    root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, columns: Tensor | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Builds the best trees of at most `budget` nodes.

    Args:
        root_tokens: int64 [B].
        tokens: int64 [B, D, R, K], the candidates of each law, best first and each token once among those that exist; R is 1
            where all parents of a depth share a law.
        log_probs: float32 [B, D, R, K], at most 0 and falling; -inf marks a candidate that does not exist.
        columns: int64 [B, D, R, K], the law of the next depth that stands behind each candidate; None where R is 1.
        budget: most nodes, root included, above D.

    Returns:
        Tokens, parents and depths int64 [B, N], scores float32 [B, N] and the number of nodes int64 [B], as in a `TokenTree`
        whose nodes stand best first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the kernel is too small for them, see `fits`.

    Example:
        >>> tokens = torch.tensor([[[[7, 3]], [[5, 8]]]])
        >>> log_probs = torch.tensor([[[[0.6, 0.4]], [[0.9, 0.1]]]]).log()
        >>> expand_tree_reference(torch.tensor([1]), tokens, log_probs, None, 4)[0].tolist()
        [[1, 7, 5, 3]]
    """
    # Loaded when used: triton is not needed for anything else.
    from jetflow.kernels.expand_triton import expand_tree_op

    _check(root_tokens, tokens, log_probs, columns, budget)
    if not fits(log_probs, budget):
        raise ValueError(f"budget={budget} with laws {list(log_probs.shape)} needs more than {MAX_SORTED} sorted places")
    return expand_tree_op(root_tokens, tokens, log_probs, columns, budget)


def expand_tree_reference(
    root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, columns: Tensor | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`expand_tree` in plain PyTorch; any budget."""
    _check(root_tokens, tokens, log_probs, columns, budget)
    batch, levels, _, width = tokens.shape
    sizes = level_sizes(levels, width, budget)
    zeros = tokens.new_zeros(batch, 1)
    frontier, law, start = zeros.float(), zeros, 0
    # The ledger of all that is kept: tokens, parents and depths, and scores.
    kept, scores = [torch.stack([root_tokens[:, None], zeros, zeros])], [frontier]
    for level, size in enumerate(sizes[1:], 1):
        rows = law[:, :, None].expand(-1, -1, width)
        offered = (frontier[:, :, None] + log_probs[:, level - 1].gather(1, rows)).flatten(1)
        best = best_indices(offered, size)
        found = tokens[:, level - 1].gather(1, rows).flatten(1).gather(1, best)
        kept.append(torch.stack([found, best // width + start, torch.full_like(best, level)]))
        if columns is not None:
            law = columns[:, level - 1].gather(1, rows).flatten(1).gather(1, best)
        else:
            law = torch.zeros_like(best)
        frontier = offered.gather(1, best)
        scores.append(frontier)
        start += sizes[level - 1]
    ledger, priorities = torch.cat(kept, dim=2), torch.cat(scores, dim=1)
    count = min(budget, priorities.shape[1])
    best = torch.cat([zeros, best_indices(priorities[:, 1:], count - 1) + 1], dim=1)
    place = torch.zeros_like(ledger[1]).scatter(1, best, torch.arange(count, device=best.device).expand_as(best))
    exists = priorities.gather(1, best) != NEVER
    found, above, depths = (one.gather(1, best) for one in ledger)
    parents = torch.where(exists, place.gather(1, above), -1)
    parents[:, 0] = -1
    return (
        torch.where(exists, found, 0),
        parents,
        torch.where(exists, depths, 0),
        torch.where(exists, priorities.gather(1, best), NEVER),
        exists.sum(dim=1),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check(root_tokens: Tensor, tokens: Tensor, log_probs: Tensor, columns: Tensor | None, budget: int) -> None:
    if root_tokens.dim() != 1 or root_tokens.dtype != torch.int64:
        raise ValueError(f"root_tokens must be int64 [B], got {root_tokens.dtype} {list(root_tokens.shape)}")
    shape = tokens.shape
    if len(shape) != 4 or shape[0] != len(root_tokens) or min(shape) < 1:
        raise ValueError(f"tokens must be int64 [{len(root_tokens)}, D, R, K], got {list(shape)}")
    if (shape[2] > 1) != (columns is not None):
        raise ValueError(f"columns must be given where a depth has several laws and only there, got {shape[2]} laws")
    wanted = [("tokens", tokens, torch.int64), ("log_probs", log_probs, torch.float32)]
    for name, one, dtype in [*wanted, *([] if columns is None else [("columns", columns, torch.int64)])]:
        if one.dtype != dtype or one.shape != shape or one.device != root_tokens.device:
            raise ValueError(f"{name} must be {dtype} {list(shape)} on {root_tokens.device}, got {one.dtype} {list(one.shape)}")
    if budget <= shape[1]:
        raise ValueError(f"budget must be above the {shape[1]} levels of tokens, got {budget}")
