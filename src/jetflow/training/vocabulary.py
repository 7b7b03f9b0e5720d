"""The vocabulary that a training step compares laws over: all of it, or a sample that stands for it.

Dimension key: V vocabulary, R sampled tokens, M slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from jetflow.targets import Target


class VocabularySample(NamedTuple):
    """Tokens that stand for a whole vocabulary.

    Attributes:
        token_ids: int64 [R], rising.
        log_weights: float32 [R]; log of how many tokens each one stands for, to be added to its logit.
    """

    token_ids: Tensor
    log_weights: Tensor

    def index_of(self, labels: Tensor) -> Tensor:
        """Places of `labels` int64 [M], all of which are in the sample, within `token_ids`."""
        return torch.searchsorted(self.token_ids, labels)


class SampledVocabulary:
    """Draws samples of a vocabulary: frequent tokens and the labels themselves always, of the rest a few at random.

    A random token stands for all tokens that could have been drawn in its place, so that the softmax over the sample
    estimates that over the vocabulary without bias in its normaliser. The loss of a step then costs R/V of the whole one,
    and the head is still trained for the whole vocabulary.

    Args:
        frequent: int64 [F], token ids that are always in the sample, such as those that occur in the training data.
        vocab_size: V.
        num_random: tokens drawn from the rest each time.

    Raises:
        ValueError: a token is outside the vocabulary or `num_random` is below 1.
    """

    def __init__(self, frequent: Tensor, vocab_size: int, *, num_random: int = 1024):
        if num_random < 1:
            raise ValueError(f"num_random must be at least 1, got {num_random}")
        if len(frequent) and not 0 <= int(frequent.min()) <= int(frequent.max()) < vocab_size:
            raise ValueError(f"frequent tokens must be in [0, {vocab_size}), got up to {int(frequent.max())}")
        self.num_random = num_random
        self._always = torch.zeros(vocab_size, dtype=torch.bool)
        self._always[frequent.cpu()] = True

    def sample(self, labels: Tensor, generator: torch.Generator | None = None) -> VocabularySample:
        """Returns a sample that holds every one of `labels`, int64 [M]; `generator` is on the CPU."""
        kept = self._always.clone()
        kept[labels.cpu()] = True
        rest = (~kept).nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest), generator=generator)[: self.num_random]]
        weights = torch.zeros(len(kept))
        if len(drawn):
            weights[drawn] = math.log(len(rest) / len(drawn))
            kept[drawn] = True
        token_ids = kept.nonzero()[:, 0]
        return VocabularySample(token_ids.to(labels.device), weights[token_ids].to(labels.device))


class FrozenLMHead:
    """The target's output embedding as a constant: gradients reach the hidden states but no parameter of the target."""

    def __init__(self, target: Target, sample: VocabularySample | None):
        tokens = slice(None) if sample is None else sample.token_ids
        self._weight, self._bias = target.output_rows(tokens)
        if sample is not None:
            log_weights = sample.log_weights.to(self._weight.dtype)
            self._bias = log_weights if self._bias is None else self._bias + log_weights

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias)
