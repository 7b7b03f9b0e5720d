"""Published corrections, whose two tables W1 and W2 stand in the checkpoint: those of DSpark and of DFlash 2.

They draft as `corrections` says; training does not know them. Parameter names are those of the public checkpoints.

Dimension key: H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.corrections import PairwiseCorrection, RecurrentCorrection


class MarkovCorrection(nn.Module):
    """DSpark's Markov head (arXiv 2607.05147): `m_d` is the previous token's row of W1.

    Args:
        vocab_size: V.
        hidden_size: H; the plain kind does not read hidden states.
        rank: R.
    """

    recurrent: bool = False
    num_candidates: int | None = None

    def __init__(self, vocab_size: int, hidden_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def tables(self, embed: Callable[[Tensor], Tensor], output_weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        return self.markov_w1.weight, self.markov_w2.weight

    def gates(self, states: Tensor) -> Tensor:
        """See `Correction`; the plain kind has none."""
        return states

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        return rows, None


class GatedMarkovCorrection(MarkovCorrection):
    """DSpark's gated kind: `m_d = sigmoid(G [h_d ; w]) * w`, w being the previous token's row of W1.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: R.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int):
        super().__init__(vocab_size, hidden_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def gates(self, states: Tensor) -> Tensor:
        """See `Correction`."""
        return linear(states, self.gate_proj.weight[:, : states.shape[-1]], self.gate_proj.bias)

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        return rows * (gates + linear(rows, self.gate_proj.weight[:, -rows.shape[-1] :])).sigmoid(), None


class RecurrentMarkovCorrection(MarkovCorrection):
    """DSpark's `rnn` kind: `[g, c, o] = J [s ; w ; h_d]`, `m_d = tanh(o)`, `s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`.

    The memory s is zero at the root.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: R, also the width of the memory.
    """

    recurrent = True

    def __init__(self, vocab_size: int, hidden_size: int, rank: int):
        super().__init__(vocab_size, hidden_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def gates(self, states: Tensor) -> Tensor:
        """See `Correction`."""
        return linear(states, self.joint_proj.weight[:, -states.shape[-1] :], self.joint_proj.bias)

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        memory, rank = torch.zeros_like(rows) if memory is None else memory, rows.shape[-1]
        of_memory, of_rows = self.joint_proj.weight[:, : 2 * rank].split(rank, dim=1)
        gate, candidate, output = (gates + linear(memory, of_memory) + linear(rows, of_rows)).chunk(3, dim=-1)
        keep = gate.sigmoid()
        return output.tanh(), keep * memory + (1 - keep) * candidate.tanh()


class SelectorCorrection(nn.Module):
    """DFlash 2's path selector (PyPI `dflash` 0.1.0): `m_d = w * (P h_d)`, among the likeliest tokens of a depth alone.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: R.
        num_candidates: tokens of a depth that it chooses among.
    """

    recurrent: bool = False

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, num_candidates: int):
        super().__init__()
        self.num_candidates: int | None = num_candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def tables(self, embed: Callable[[Tensor], Tensor], output_weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        return self.predecessor_codebook, self.successor_codebook

    def gates(self, states: Tensor) -> Tensor:
        """See `Correction`."""
        return self.hidden_projection(states)

    def mix(self, rows: Tensor, gates: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Correction`."""
        return rows * gates, None


MARKOV_KINDS = {
    "markov": MarkovCorrection,
    "markov-gated": GatedMarkovCorrection,
    "markov-recurrent": RecurrentMarkovCorrection,
}


def make_correction(config: DraftHeadConfig) -> PairwiseCorrection | MarkovCorrection | SelectorCorrection | None:
    """Builds the correction that a config names; None where it names none."""
    kind, width, rank = config.correction, config.hidden_size, config.correction_rank
    if kind is None:
        return None
    if kind in MARKOV_KINDS:
        return MARKOV_KINDS[kind](config.vocab_size, width, rank)
    if config.published.selector_candidates is not None:
        return SelectorCorrection(config.vocab_size, width, rank, config.published.selector_candidates)
    if kind == "recurrent":
        return RecurrentCorrection(width, rank)
    return PairwiseCorrection(width, rank, gated=kind == "gated")
