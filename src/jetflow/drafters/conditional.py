"""The laws of a head with a correction, as a candidate source: children depend on their parent's path.

Dimension key: B batch, D draft levels, F frontier slots, K candidates, H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.drafters.words import HeadWords
from jetflow.heads.corrections import Correction
from jetflow.protocols import CandidateSource
from jetflow.trees.ranking import likeliest_tokens
from jetflow.trees.sources import MarginalSource, PairwiseSource, RecurrentSource


class ConditionalLaws:
    """A correction with its two tables, made once.

    Args:
        correction: of the head.
        words: the embeddings that the head drafts with.
    """

    @torch.no_grad()
    def __init__(self, correction: Correction, words: HeadWords):
        self._correction = correction
        self._read, self._write = correction.tables(words.embed, words.output_rows(slice(None))[0])
        self._token_ids = words.token_ids

    @torch.no_grad()
    def source(self, states: Tensor, logits: Tensor, root_tokens: Tensor, width: int) -> CandidateSource:
        """Returns the source of a tree.

        Args:
            states: float [B, D, H], level 1 first.
            logits: float [B, D, V] of these states, or of the tokens that `words` is made for; level 1 is changed in place.
            root_tokens: int64 [B].
            width: candidates per depth.
        """
        correction = self._correction
        # The law of level 1 is known before the candidates are, so that it is corrected whole.
        logits[:, 0] = self.corrected(states[:, 0], logits[:, 0], root_tokens)
        if correction.recurrent:
            return self._recurrent(states, MarginalSource.from_logits(logits, width, token_ids=self._token_ids))

        def additions(parents: Tensor, candidates: Tensor) -> Tensor:
            mixed, _ = correction.mix(self._read[parents], states[:, 1:, None])
            return mixed @ self._write[candidates].mT

        return PairwiseSource.from_logits(
            logits, width, additions, token_ids=self._token_ids, num_corrected=correction.num_candidates
        )

    @torch.no_grad()
    def corrected(self, states: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns whole logits [..., V] of states [..., H], corrected by the tokens before, int64 [...]."""
        mixed, _ = self._correction.mix(self._read[tokens], states)
        count = self._correction.num_candidates
        if count is None:
            write = self._write if self._token_ids is None else self._write[self._token_ids]
            return logits + mixed @ write.mT
        best = likeliest_tokens(logits.float(), min(count, logits.shape[-1]))
        plain = logits.float().gather(-1, best)
        candidates = best if self._token_ids is None else self._token_ids[best]
        scores = plain + (self._write[candidates] @ mixed[..., None])[..., 0].float()
        # Among themselves: they keep the mass that they have together.
        corrected = scores.log_softmax(-1) + plain.logsumexp(-1, keepdim=True)
        return logits.scatter(-1, best, corrected.to(logits.dtype))

    def _recurrent(self, states: Tensor, plain: MarginalSource) -> RecurrentSource:
        write = self._write[plain.tokens]

        @torch.no_grad()
        def step(level: int, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
            mixed, memory = self._correction.mix(self._read[tokens], states[:, level - 1, None], memory)
            assert memory is not None, "recurrent corrections have a memory"
            added = mixed @ write[:, level - 1].mT
            return (torch.zeros_like(added) if level == 1 else added), memory

        return RecurrentSource(plain.tokens, plain.log_probs, step)
