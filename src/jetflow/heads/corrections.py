"""Corrections: what a node's own path adds to the logits of its depth.

All branches of a tree share the head's hidden state h_d of a depth. A correction makes the law of a node depend on the
tokens before it: `logits(y_d | y_<d) = lm_head(h_d) + W2 m_d`, where m_d is a vector of `rank` numbers mixed from the rows
that the path's tokens have in a table W1. The corrections of this file make both tables from the target's embeddings,
W1 = down(embedding) and W2 = lm_head . up, so that rare tokens learn from frequent ones, and
`lm_head(h_d) + W2 m_d = lm_head(h_d + up(m_d))`; those of `vocabulary_corrections` hold both.

`up` starts at zero: a new correction changes nothing.

Dimension key: T slots in path order, H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

# Factored corrections are computed for so many tokens at a time.
TOKENS_AT_ONCE = 8192


class Correction(Protocol):
    """What drafting needs of a correction.

    Attributes:
        recurrent: whether `mix` reads and gives a memory of the path; without, the token before is all that counts.
        num_candidates: how many of a depth's likeliest tokens are corrected, among themselves, so that they keep the mass
            that they have together; None corrects all tokens.
    """

    recurrent: bool
    num_candidates: int | None

    def tables(self, embed: Callable[[Tensor], Tensor], output_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns W1 and W2, float [V, R] each, given the embedding, ids -> [..., H], and the output embedding [V, H]."""
        ...

    def gates(self, states: Tensor) -> Tensor:
        """Returns what `mix` reads of final-normed states [..., H], whatever the paths before them: float [..., *]."""
        ...

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Mixes rows [..., R] of W1, those of the last tokens of paths, with the gates of the depth behind them.

        Args:
            rows: float [..., R].
            gates: float [..., *], see `gates`; leading dimensions as those of `rows`, or 1.
            memory: float [..., R], of the paths without their last tokens; None at the root.

        Returns:
            m_d, float [..., R], and the memory of the paths, None where there is none.
        """
        ...


class PairwiseCorrection(nn.Module):
    """A factored correction by the previous token alone: `m_d = gate(h_d) * down(e(y_{d-1}))`.

    Args:
        hidden_size: H, that of the head and of the target's embeddings.
        rank: R.
        gated: scale the R numbers by `2 sigmoid(W h_d)`, which starts at 1; without, all depths share one table.
    """

    recurrent: bool = False
    num_candidates: int | None = None

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
        return states + self.up(self.mix(self.read(previous_embeds), self.gates(states))[0])

    def read(self, embeds: Tensor) -> Tensor:
        """Turns token embeddings [..., H] into their rows of W1, [..., R]."""
        return self.down(_unit(embeds))

    def tables(self, embed: Callable[[Tensor], Tensor], output_weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        tokens = torch.arange(len(output_weight), device=output_weight.device)
        rows = torch.cat([self.read(embed(part)) for part in tokens.split(TOKENS_AT_ONCE)])
        return rows, output_weight @ self.up.weight

    def gates(self, states: Tensor) -> Tensor:
        """See `Correction`; [..., R] where there is a gate."""
        return states if self.gate is None else 2 * self.gate(states).sigmoid()

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        return rows if self.gate is None else rows * gates, None


class RecurrentCorrection(PairwiseCorrection):
    """A factored correction by the whole path: a gated recurrent unit reads its tokens, `m_d = gate(h_d) * (x_d + s_d)`.

    `x_d = down(e(y_{d-1}))` as in the pairwise correction, and `s_d = GRU(x_d, s_{d-1})`; as in Domino (arXiv 2605.29707).

    Args:
        hidden_size: H.
        rank: R, also the width of the unit.
    """

    recurrent = True

    def __init__(self, hidden_size: int, rank: int):
        super().__init__(hidden_size, rank, gated=True)
        self.unit = nn.GRUCell(rank, rank)

    def forward(self, states: Tensor, previous_embeds: Tensor) -> Tensor:
        """Corrects hidden states; arguments and result as for the pairwise correction."""
        inputs, gates = self.read(previous_embeds), self.gates(states)
        # A slot without a token before it is left as it is, and so is the memory.
        known = (previous_embeds != 0).any(-1, keepdim=True)
        memory = torch.zeros_like(inputs[..., 0, :])
        mixed = []
        for slot in range(inputs.shape[-2]):
            memory = torch.where(known[..., slot, :], self.step(inputs[..., slot, :], memory), memory)
            mixed.append(inputs[..., slot, :] + memory)
        return states + self.up(torch.stack(mixed, dim=-2) * gates * known)

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        memory = self.step(rows, torch.zeros_like(rows) if memory is None else memory)
        return (rows + memory) * gates, memory

    def step(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """Advances memories [..., R] by what `read` made of their next tokens, [..., R]."""
        return self.unit(inputs.flatten(0, -2), memory.flatten(0, -2)).view_as(memory)


def _unit(embeds: Tensor) -> Tensor:
    """Scales embeddings to a root mean square of 1, so that the size of the target's embedding does not matter."""
    wide = embeds.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-12)).to(embeds.dtype)
