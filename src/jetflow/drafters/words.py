"""How a head turns tokens into vectors and states into logits: the target's way, or its own where it has one.

Dimension key: H hidden size, R drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.targets import Target


class HeadWords:
    """The embedding and the output embedding that a head drafts with.

    A copy of the target's that the head holds is given up for the target's own weights, so that it takes no memory.

    Args:
        head: the head.
        target: the model it drafts for.
        token_ids: int64 [R], the only tokens that get logits; all when absent.
    """

    def __init__(self, head: BlockDraftHead, target: Target, token_ids: Tensor | None = None):
        parts = head.config.published
        inputs: Any = target.model.get_input_embeddings()
        outputs: Any = target.model.get_output_embeddings()
        for own, theirs in ((head.embed_tokens, inputs), (head.lm_head, outputs)):
            if own is not None and torch.equal(own.weight, theirs.weight):
                own.weight = theirs.weight
        self.token_ids = token_ids
        self._parts, self._target, self._own = parts, target, head.embed_tokens
        self._input_weight = inputs.weight
        self._output: Any = outputs if head.lm_head is None else head.lm_head
        self._rows = None if token_ids is None else self.output_rows(token_ids)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings [..., H] of `token_ids` int64 [...]."""
        if self._own is not None:
            embeds = self._own(token_ids)
        elif self._parts.embedding_scale is None:
            return self._target.embed(token_ids)
        else:
            embeds = embedding(token_ids, self._input_weight)
        return embeds if self._parts.embedding_scale is None else embeds * self._parts.embedding_scale

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits [..., V] of final-normed states [..., H], or [..., R] of `token_ids`."""
        logits = self._output(states) if self._rows is None else linear(states, *self._rows)
        if self._parts.output_scale != 1.0:
            logits = logits * self._parts.output_scale
        cap = self._parts.output_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def output_rows(self, token_ids: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Returns weight [R, H] and bias [R] or None of the output embedding for `token_ids` int64 [R], without gradients."""
        bias = getattr(self._output, "bias", None)
        return self._output.weight.detach()[token_ids], None if bias is None else bias.detach()[token_ids]
