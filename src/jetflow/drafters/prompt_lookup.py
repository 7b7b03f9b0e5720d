"""PromptLookupDrafter: proposes what followed earlier occurrences of the last tokens. Needs no training."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from jetflow.protocols import DraftContext
from jetflow.trees.token_tree import TokenTree

# How often the next token is that of the latest earlier occurrence, by how many tokens agree before it: a count over 150
# answers of SmolLM2-135M-Instruct, rounded by eye (`bench/lookup_agreement.py` counts yours). Longer ones count as the last.
CONFIDENCE = (0.26, 0.53, 0.63, 0.73, 0.79, 0.83, 0.86, 0.88, 0.9)


class PromptLookupDrafter:
    """Looks up the last n-gram in prompt and output and drafts its continuations as one tree.

    The longest n-gram that occurs earlier counts; several occurrences that go on differently become branches. A branch
    weighs as many occurrences as share it, recent ones more, times how far so long an agreement can be trusted.

    Args:
        max_ngram: longest n-gram to look for; shorter ones down to 1 are tried after it.
        max_depth: most tokens copied from one occurrence.
        max_matches: most occurrences used, the latest ones.
        min_prob: nodes that are less likely are not proposed: they cost the target more than they bring.

    Raises:
        ValueError: a setting is below 1, or `min_prob` is not in [0, 1).

    Example:
        >>> import torch
        >>> context = DraftContext(torch.tensor([2]), torch.tensor([4]), [[1, 2, 7, 1, 2]], max_depth=8)
        >>> PromptLookupDrafter().propose(context, budget=3).tokens.tolist()
        [[2, 7, 1]]
    """

    def __init__(self, max_ngram: int = 4, max_depth: int = 16, *, max_matches: int = 16, min_prob: float = 0.05):
        for name, value in (("max_ngram", max_ngram), ("max_depth", max_depth), ("max_matches", max_matches)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= min_prob < 1:
            raise ValueError(f"min_prob must be in [0, 1), got {min_prob}")
        self._least = math.log(min_prob) if min_prob else -math.inf
        self.max_ngram = max_ngram
        self.max_depth = max_depth
        self.max_matches = max_matches

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns trees of at most `budget` nodes, of the root alone where nothing matches."""
        depth = min(self.max_depth, context.max_depth)
        rows = [self._row(ids, depth, budget) for ids in context.token_ids]
        width = max(len(tokens) for tokens, _, _ in rows)
        counts = [len(tokens) for tokens, _, _ in rows]
        tree = TokenTree.from_parents(
            [tokens + [0] * (width - len(tokens)) for tokens, _, _ in rows],
            [parents + [-1] * (width - len(parents)) for _, parents, _ in rows],
            [scores + [0.0] * (width - len(scores)) for _, _, scores in rows],
            num_nodes=counts,
        )
        return tree.to(context.root_tokens.device)

    def _row(self, token_ids: Sequence[int], depth: int, budget: int) -> tuple[list[int], list[int], list[float]]:
        """Returns tokens, parents and scores of one row's tree, best nodes first."""
        size, continuations = latest_matches(np.asarray(token_ids), self.max_ngram, depth, self.max_matches)
        tokens, parents, scores = [int(token_ids[-1])], [-1], [0.0]
        # Groups of occurrences that share their path so far: (-score, order, token, parent, members).
        frontier: list[tuple[float, int, int, int, list[np.ndarray]]] = []
        order = 0

        def push(node: int, members: list[np.ndarray], level: int) -> None:
            nonlocal order
            # Later occurrences come first and weigh more.
            weights = {id(member): 1.0 / (1 + rank) for rank, member in enumerate(members)}
            total = sum(weights.values()) / CONFIDENCE[min(size + level, len(CONFIDENCE)) - 1]
            groups: dict[int, list[np.ndarray]] = {}
            for member in members:
                if len(member) > level:
                    groups.setdefault(int(member[level]), []).append(member)
            for token, group in groups.items():
                log_prob = math.log(sum(weights[id(member)] for member in group) / total)
                if scores[node] + log_prob >= self._least:
                    heapq.heappush(frontier, (-(scores[node] + log_prob), order, token, node, group))
                    order += 1

        push(0, continuations, 0)
        levels = [0]
        while frontier and len(tokens) < budget:
            negative, _, token, parent, group = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            levels.append(levels[parent] + 1)
            push(len(tokens) - 1, group, levels[-1])
        return tokens, parents, scores


def latest_matches(token_ids: np.ndarray, max_ngram: int, depth: int, limit: int) -> tuple[int, list[np.ndarray]]:
    """Returns the longest matching final n-gram's size and what followed its latest earlier occurrences, latest first."""
    length = len(token_ids)
    for size in range(min(max_ngram, length - 1), 0, -1):
        ends = np.arange(size, length)
        found = np.ones(length - size, dtype=bool)
        for offset in range(1, size + 1):
            found &= token_ids[ends - offset] == token_ids[-offset]
        starts = ends[found][::-1][:limit]
        if len(starts) and depth > 0:
            return size, [token_ids[start : start + depth] for start in starts]
    return 0, []
