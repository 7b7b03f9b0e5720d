"""Vocabulary samples: labels and frequent tokens always, an unbiased normaliser, and bad input."""

import math

import pytest
import torch

from jetflow.training.vocabulary import SampledVocabulary

VOCAB = 50


def test_frequent_tokens_and_labels_are_always_there_and_stand_for_themselves():
    labels = torch.tensor([40, 3, 41, 40])
    for seed in range(5):
        sample = SampledVocabulary(torch.arange(6), VOCAB, num_random=10).sample(labels, torch.Generator().manual_seed(seed))
        tokens = sample.token_ids.tolist()
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 6 + 2 + 10
        assert torch.equal(sample.token_ids[sample.index_of(labels)], labels)
        weights = dict(zip(tokens, sample.log_weights.tolist(), strict=True))
        assert all(weights[token] == 0 for token in (*range(6), 40, 41))
        rest = VOCAB - 8
        assert all(w == pytest.approx(math.log(rest / 10)) for t, w in weights.items() if t >= 6 and t not in (40, 41))


def test_normaliser_is_estimated_without_bias():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, generator=generator)
    vocabulary = SampledVocabulary(torch.arange(6), VOCAB, num_random=10)
    estimates = []
    for _ in range(2000):
        sample = vocabulary.sample(torch.tensor([3]), generator)
        estimates.append((logits[sample.token_ids] + sample.log_weights).exp().sum())
    mean, error = torch.stack(estimates).mean(), torch.stack(estimates).std() / 2000**0.5
    assert abs(mean - logits.exp().sum()) < 4 * error


def test_whole_vocabulary_when_there_are_fewer_left_than_asked_for():
    sample = SampledVocabulary(torch.arange(6), VOCAB, num_random=1000).sample(torch.tensor([7]))
    assert sample.token_ids.tolist() == list(range(VOCAB))
    assert not sample.log_weights.any()


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="num_random must be at least 1, got 0"):
        SampledVocabulary(torch.arange(3), VOCAB, num_random=0)
    with pytest.raises(ValueError, match=r"frequent tokens must be in \[0, 50\), got up to 50"):
        SampledVocabulary(torch.tensor([1, 50]), VOCAB)
