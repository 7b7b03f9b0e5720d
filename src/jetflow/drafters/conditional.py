"""The laws of a head with a correction, as a candidate source: children depend on their parent's path.

Dimension key: B batch, D draft levels, F frontier slots, K candidates, H hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from jetflow.drafters.words import HeadWords
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.corrections import Correction, PairwiseCorrection
from jetflow.protocols import CandidateSource
from jetflow.trees.sources import MarginalSource, PairwiseSource, RecurrentSource


class ConditionalLaws:
    """A head's correction with its two tables, made once.

    Args:
        head: a head with a correction.
        words: the embeddings that the head drafts with.

    Attributes:
        num_candidates: tokens of a depth that the correction chooses among; None for all.
    """

    @torch.no_grad()
    def __init__(self, head: BlockDraftHead, words: HeadWords):
        correction = head.correction
        assert correction is not None, "only heads with a correction have conditional laws"
        self._correction: Correction = correction
        self._words = words
        self.num_candidates = correction.num_candidates
        self._read, self._write = self._correction.tables(words.embed, words.output_rows(slice(None))[0])

    @torch.no_grad()
    def gates(self, states: Tensor) -> Tensor:
        """Returns what the correction reads of states [B, T, H], float [B, T, *]."""
        return self._correction.gates(states)

    @torch.no_grad()
    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Corrects slots [B, T, H] behind known tokens, int64 [B, T], by our own kinds; [B, T, V], or those of `words`."""
        assert isinstance(self._correction, PairwiseCorrection), "slots that hold tokens are corrected by our own kinds"
        mixed, _ = self._correction.mix(embedding(tokens, self._read), self._correction.gates(states))
        return self._words.logits(states + self._correction.up(mixed))

    @torch.no_grad()
    def source(self, root_tokens: Tensor, gates: Tensor, logits: Tensor, width: int) -> CandidateSource:
        """Returns the source of a tree.

        Args:
            root_tokens: int64 [B].
            gates: float [B, D, *], level 1 first.
            logits: float [B, D, V], uncorrected.
            width: candidates per depth.
        """
        correction, token_ids = self._correction, self._words.token_ids
        if correction.recurrent:
            return self._recurrent(gates, MarginalSource.from_logits(logits, width, token_ids=token_ids))

        def additions(parents: Tensor, candidates: Tensor) -> Tensor:
            mixed, _ = correction.mix(embedding(parents, self._read), gates[:, :, None])
            return mixed @ embedding(candidates, self._write).mT

        return PairwiseSource.from_logits(
            root_tokens, logits, width, additions, token_ids=token_ids, num_corrected=correction.num_candidates
        )

    def _recurrent(self, gates: Tensor, plain: MarginalSource) -> RecurrentSource:
        write = self._write[plain.tokens]

        @torch.no_grad()
        def step(level: int, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
            mixed, memory = self._correction.mix(embedding(tokens, self._read), gates[:, level - 1, None], memory)
            assert memory is not None, "recurrent corrections have a memory"
            return mixed @ write[:, level - 1].mT, memory

        return RecurrentSource(plain.tokens, plain.log_probs, step)
