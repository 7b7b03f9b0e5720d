"""Corrections: what a node's own path adds to the hidden state of its depth.

All branches of a tree share the head's hidden state h_d of a depth. A correction makes the law of a node depend on the
tokens before it: `logits(y_d | y_<d) = lm_head(h_d + up(m_d))`, where m_d is a vector of `rank` numbers made from the
path. As `lm_head` is linear, this is `lm_head(h_d) + W2 m_d` with W2 = lm_head . up: an addition of low rank to the logits,
the Markov head of DSpark (arXiv 2607.05147) with its two V x rank matrices factored through the target's own embeddings, so
that rare tokens learn from frequent ones.

`up` starts at zero: a new correction changes nothing.

Dimension key: T slots in path order, H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PairwiseCorrection(nn.Module):
    """A correction by the previous token alone: `m_d = gate(h_d) * down(e(y_{d-1}))`.

    Args:
        hidden_size: H, that of the head and of the target's embeddings.
        rank: R.
        gated: scale the R numbers by `2 sigmoid(W h_d)`, which starts at 1; without, all depths share one table.
    """

    def __init__(self, hidden_size: int, rank: int, *, gated: bool = False):
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.gate = nn.Linear(hidden_size, rank, bias=False) if gated else None
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)

    def forward(self, states: Tensor, previous_embeds: Tensor) -> Tensor:
        """Corrects the hidden states of known paths.

        Args:
            states: float [..., T, H], final-normed hidden states of slots in path order.
            previous_embeds: float [..., T, H], the target's embeddings of the tokens before each slot's; rows of zeros
                leave their slots uncorrected.

        Returns:
            float [..., T, H].
        """
        gates = self.gates(states)
        path = self.read(previous_embeds)
        return states + self.up(path if gates is None else path * gates)

    def read(self, embeds: Tensor) -> Tensor:
        """Turns token embeddings [..., H] into what a path remembers of them, [..., R]."""
        return self.down(_unit(embeds))

    def gates(self, states: Tensor) -> Tensor | None:
        """Returns the scales [..., R] of hidden states [..., H]; None where nothing is gated."""
        return None if self.gate is None else 2 * self.gate(states).sigmoid()


class RecurrentCorrection(PairwiseCorrection):
    """A correction by the whole path: a gated recurrent unit reads its tokens, `m_d = gate(h_d) * (x_d + s_d)`.

    `x_d = down(e(y_{d-1}))` as in the pairwise correction, and `s_d = GRU(x_d, s_{d-1})`; as in Domino (arXiv 2605.29707).

    Args:
        hidden_size: H.
        rank: R, also the width of the unit.
    """

    def __init__(self, hidden_size: int, rank: int):
        super().__init__(hidden_size, rank, gated=True)
        self.unit = nn.GRUCell(rank, rank)

    def forward(self, states: Tensor, previous_embeds: Tensor) -> Tensor:
        """Corrects hidden states; arguments and result as for the pairwise correction."""
        inputs, gates = self.read(previous_embeds), self.gates(states)
        assert gates is not None, "recurrent corrections are gated"
        # A slot without a token before it is left as it is, and so is the memory.
        known = (previous_embeds != 0).any(-1, keepdim=True)
        memory = torch.zeros_like(inputs[..., 0, :])
        mixed = []
        for slot in range(inputs.shape[-2]):
            memory = torch.where(known[..., slot, :], self.step(inputs[..., slot, :], memory), memory)
            mixed.append(inputs[..., slot, :] + memory)
        return states + self.up(torch.stack(mixed, dim=-2) * gates * known)

    def step(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """Advances memories [..., R] by what `read` made of their next tokens, [..., R]."""
        return self.unit(inputs.flatten(0, -2), memory.flatten(0, -2)).view_as(memory)


def make_correction(kind: str, hidden_size: int, rank: int) -> PairwiseCorrection:
    """Builds the correction that a head's config names: `pairwise`, `gated` or `recurrent`.

    Raises:
        ValueError: the kind is unknown or `rank` is below 1.
    """
    if rank < 1:
        raise ValueError(f"correction_rank must be at least 1, got {rank}")
    if kind == "recurrent":
        return RecurrentCorrection(hidden_size, rank)
    if kind not in ("pairwise", "gated"):
        raise ValueError(f"correction must be pairwise, gated or recurrent, got {kind!r}")
    return PairwiseCorrection(hidden_size, rank, gated=kind == "gated")


def _unit(embeds: Tensor) -> Tensor:
    """Scales embeddings to a root mean square of 1, so that the size of the target's embedding does not matter."""
    wide = embeds.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-12)).to(embeds.dtype)
