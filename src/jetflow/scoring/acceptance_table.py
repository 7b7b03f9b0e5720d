"""AcceptanceTable: the worth of a slot before anything is drawn into it.

Dimension key: E entropy bins, R ranks, B batch, F frontier slots, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from jetflow.protocols import Acceptance, Candidates
from jetflow.scoring.functions import law_entropy
from jetflow.trees.token_tree import TokenTree

# Upper ends of the bins of entropy, in nats.
ENTROPY_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0)


class AcceptanceTable:
    """Scores slots by how often the r-th drawn child of a law of such entropy is the accepted one.

    The score of a slot is the product of those shares along its path, as a logarithm. It uses laws and ranks, never the
    token that was drawn, so trees built by it keep the text's law exact.

    Args:
        shares: float [E, R], share of the nodes whose r-th child is accepted, by entropy of the draft's law there.
        edges: upper ends of the first E - 1 bins, in nats, rising.

    Raises:
        ValueError: the shapes do not fit, or a share is not in (0, 1).
    """

    token_blind = True

    def __init__(self, shares: Tensor | None = None, edges: Sequence[float] = ENTROPY_EDGES):
        shares = default_shares(edges) if shares is None else torch.as_tensor(shares, dtype=torch.float32)
        if shares.dim() != 2 or len(shares) != len(edges) + 1:
            raise ValueError(f"shares must be [{len(edges) + 1}, R] for {len(edges)} edges, got {list(shares.shape)}")
        if not bool(((shares > 0) & (shares < 1)).all()):
            raise ValueError("shares must be in (0, 1); give slots that were never accepted a small share")
        self._edges = torch.tensor(edges)
        self._log_shares = shares.log()

    @classmethod
    def fit(
        cls, observations: Iterable[tuple[float, int | None]], num_ranks: int, edges: Sequence[float] = ENTROPY_EDGES
    ) -> AcceptanceTable:
        """Counts which child was accepted.

        Args:
            observations: for each node that the target passed through, the entropy in nats of the draft's law there and the
                rank of the accepted child, None where none was.
            num_ranks: R.
            edges: as for the class.
        """
        counts, totals = torch.full((len(edges) + 1, num_ranks), 0.5), torch.full((len(edges) + 1,), 1.0 + 0.5 * num_ranks)
        for entropy, rank in observations:
            row = int(torch.searchsorted(torch.tensor(edges), entropy))
            totals[row] += 1
            if rank is not None and rank < num_ranks:
                counts[row, rank] += 1
        return cls(counts / totals[:, None], edges)

    @staticmethod
    def observe(tree: TokenTree, acceptance: Acceptance) -> list[tuple[float, int | None]]:
        """Returns what one round says, for `fit`: the entropy and the accepted rank of every node that was passed through.

        Args:
            tree: one tree of drawn children, such as `Round.tree`.
            acceptance: the path that the target took.

        Raises:
            ValueError: the tree's children were not drawn.
        """
        if tree.laws is None:
            raise ValueError("tree must be one of drawn children, whose laws are recorded")
        path = acceptance.path[0, : int(acceptance.num_accepted[0]) + 1].tolist()
        found: list[tuple[float, int | None]] = []
        for node, child in zip(path, [*path[1:], None], strict=True):
            probs, tokens = tree.laws.probs[0, node], tree.laws.tokens[0, node].tolist()
            if bool(probs.sum() > 0):
                rank = None if child is None else tokens.index(int(tree.tokens[0, child]))
                found.append((float(torch.special.entr(probs).sum()), rank))
        return found

    def __call__(self, candidates: Candidates) -> Tensor:
        """Returns priorities float32 [B, F, K]."""
        entropy = law_entropy(candidates.log_probs)[..., 0]
        rows = torch.searchsorted(self._edges.to(entropy.device), entropy.contiguous())
        table = self._log_shares.to(entropy.device)
        # Ranks beyond the table go on falling as its last ones do.
        last = table.shape[1] - 1
        beyond = (candidates.ranks - last).clamp(min=0)
        return candidates.parent_priorities + table[rows][..., candidates.ranks.clamp(max=last)] - 0.7 * beyond


def default_shares(edges: Sequence[float] = ENTROPY_EDGES, num_ranks: int = 8) -> Tensor:
    """Returns shares [E, R] of a plausible drafter: one that overlaps with the target by 0.9 * exp(-entropy / 6)."""
    middles = torch.tensor([0.0, *edges])
    first = 0.9 * torch.exp(-middles / 6)
    rejected = 1 - first
    ranks = torch.arange(num_ranks)
    # What the first draw leaves is met by the next ones less and less.
    return first[:, None] * (0.6 * rejected[:, None]) ** ranks
