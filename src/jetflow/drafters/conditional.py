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
from jetflow.trees.ranking import likeliest_tokens
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
        # A factored correction of a known path goes through the output embedding with the state.
        self._up = correction.up if isinstance(correction, PairwiseCorrection) and head.config.is_plain else None
        self._words = words
        self.num_candidates = correction.num_candidates
        self._read, self._write = self._correction.tables(words.embed, words.output_rows(slice(None))[0])

    @torch.no_grad()
    def logits(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Corrects the slots whose path is known, the first S of T.

        Args:
            states: float [B, T, H].
            tokens: int64 [B, S], before the first S slots.

        Returns:
            The gates of all states, float [B, T, *], and logits [B, T, V], or those of the tokens that `words` is made for.
        """
        gates, known = self._correction.gates(states), tokens.shape[1]
        mixed, _ = self._correction.mix(embedding(tokens, self._read), gates[:, :known])
        if self._up is not None:
            corrected = states[:, :known] + self._up(mixed)
            return gates, self._words.logits(torch.cat([corrected, states[:, known:]], dim=1))
        logits = self._words.logits(states)
        logits[:, :known] = self._added(logits[:, :known], mixed)
        return gates, logits

    @torch.no_grad()
    def source(self, gates: Tensor, logits: Tensor, width: int) -> CandidateSource:
        """Returns the source of a tree.

        Args:
            gates: float [B, D, *], level 1 first.
            logits: float [B, D, V]; level 1, whose law is known before the candidates are, is corrected by the root.
            width: candidates per depth.
        """
        correction, token_ids = self._correction, self._words.token_ids
        if correction.recurrent:
            return self._recurrent(gates, MarginalSource.from_logits(logits, width, token_ids=token_ids))

        def additions(parents: Tensor, candidates: Tensor) -> Tensor:
            mixed, _ = correction.mix(embedding(parents, self._read), gates[:, 1:, None])
            return mixed @ embedding(candidates, self._write).mT

        return PairwiseSource.from_logits(
            logits, width, additions, token_ids=token_ids, num_corrected=correction.num_candidates
        )

    def _added(self, logits: Tensor, mixed: Tensor) -> Tensor:
        """Corrects whole logits [..., V] by what was mixed of their paths, [..., R]."""
        count, token_ids = self._correction.num_candidates, self._words.token_ids
        if count is None:
            write = self._write if token_ids is None else self._write[token_ids]
            return logits + mixed @ write.mT
        best = likeliest_tokens(logits.float(), min(count, logits.shape[-1]))
        plain = logits.float().gather(-1, best)
        candidates = best if token_ids is None else token_ids[best]
        scores = plain + (self._write[candidates] @ mixed[..., None])[..., 0].float()
        # Among themselves: they keep the mass that they have together.
        corrected = scores.log_softmax(-1) + plain.logsumexp(-1, keepdim=True)
        return logits.scatter(-1, best, corrected.to(logits.dtype))

    def _recurrent(self, gates: Tensor, plain: MarginalSource) -> RecurrentSource:
        write = self._write[plain.tokens]

        @torch.no_grad()
        def step(level: int, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
            mixed, memory = self._correction.mix(embedding(tokens, self._read), gates[:, level - 1, None], memory)
            assert memory is not None, "recurrent corrections have a memory"
            added = mixed @ write[:, level - 1].mT
            return (torch.zeros_like(added) if level == 1 else added), memory

        return RecurrentSource(plain.tokens, plain.log_probs, step)
