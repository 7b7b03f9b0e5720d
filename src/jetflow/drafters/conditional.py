"""The laws of a head with a correction, as a candidate source: children depend on their parent's path.

Dimension key: B batch, D draft levels, F frontier slots, K candidates, H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.heads.corrections import PairwiseCorrection, RecurrentCorrection
from jetflow.protocols import CandidateSource
from jetflow.targets import Target
from jetflow.trees.sources import MarginalSource, PairwiseSource, RecurrentSource


class ConditionalLaws:
    """A correction with its two vocabulary-sized tables, computed once: W1 = down(embedding), W2 = lm_head . up.

    Args:
        correction: of the head.
        target: whose embedding and output embedding the tables are made from.
    """

    @torch.no_grad()
    def __init__(self, correction: PairwiseCorrection, target: Target):
        self._correction = correction
        self._target = target
        tokens = torch.arange(target.vocab_size, device=target.device)
        self._read = torch.cat([correction.read(target.embed(part)) for part in tokens.split(8192)])
        self._write = target.output_rows(slice(None))[0] @ correction.up.weight

    def correct_first(self, states: Tensor, root_tokens: Tensor) -> Tensor:
        """Corrects the first of the states [B, D, H] by the root: its law is known before the candidates are."""
        root = self._target.embed(root_tokens)[:, None]
        return torch.cat([self._correction(states[:, :1], root), states[:, 1:]], dim=1)

    def source(self, states: Tensor, logits: Tensor, width: int, token_ids: Tensor | None) -> CandidateSource:
        """Returns the source of a tree.

        Args:
            states: float [B, D, H], level 1 first, that level corrected.
            logits: float [B, D, V] of these states, or over `token_ids`.
            width: candidates per depth.
            token_ids: int64 [V], the token that each column stands for.
        """
        gates = self._correction.gates(states)
        if isinstance(self._correction, RecurrentCorrection):
            return self._recurrent(self._correction, gates, MarginalSource.from_logits(logits, width, token_ids=token_ids))

        def additions(parents: Tensor, candidates: Tensor) -> Tensor:
            paths = self._read[parents]
            paths = paths if gates is None else paths * gates[:, 1:, None]
            return paths @ self._write[candidates].mT

        return PairwiseSource.from_logits(logits, width, additions, token_ids=token_ids)

    def _recurrent(self, correction: RecurrentCorrection, gates: Tensor | None, plain: MarginalSource) -> RecurrentSource:
        assert gates is not None, "recurrent corrections are gated"
        scales, write = gates, self._write[plain.tokens]
        inputs = self._read[:0]

        def advance(tokens: Tensor, memory: Tensor | None) -> Tensor:
            nonlocal inputs
            inputs = self._read[tokens]
            return correction.step(inputs, torch.zeros_like(inputs) if memory is None else memory)

        def additions(level: int, memory: Tensor) -> Tensor:
            if level == 1:
                return memory.new_zeros(*memory.shape[:2], write.shape[2])
            paths = (inputs + memory) * scales[:, level - 1, None]
            return paths @ write[:, level - 1].mT

        return RecurrentSource(plain.tokens, plain.log_probs, advance, additions)
