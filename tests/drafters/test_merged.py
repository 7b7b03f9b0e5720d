"""Merged trees: one root, equal paths once, honest probabilities, the target's text."""

import math

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import DraftContext, DraftModelDrafter, MergedDrafter, PromptLookupDrafter, SpeculativeDecoder, Target, TokenTree

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


class Fixed:
    """Always the same tree."""

    def __init__(self, tokens, parents, probs, taps=()):
        self.tree = TokenTree.from_parents([tokens], [parents], [[math.log(prob) for prob in probs]])
        self.taps = taps

    def propose(self, context, budget):
        return self.tree.first(budget)


CONTEXT = DraftContext(torch.tensor([5]), torch.tensor([3]), [[1, 2, 3, 5]], max_depth=8)


def test_paths_are_mixed_by_weight():
    first = Fixed([5, 7, 8, 9], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.5])
    second = Fixed([5, 8, 4, 9], [-1, 0, 1, 2], [1.0, 0.8, 0.4, 0.4])
    tree = MergedDrafter([first, second], [3, 1]).propose(CONTEXT, 16)
    assert tree.tokens.tolist() == [[5, 7, 8, 9, 4, 9]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 4]]
    expected = torch.tensor([[1.0, 0.45, 0.425, 0.375, 0.1, 0.1]])
    torch.testing.assert_close(tree.scores.exp(), expected)
    assert MergedDrafter([first, second], [3, 1]).propose(CONTEXT, 3).tokens.tolist() == [[5, 7, 8]]


def test_a_drafter_without_a_proposal_leaves_its_weight_to_the_other():
    first = Fixed([5, 7], [-1, 0], [1.0, 0.6])
    tree = MergedDrafter([first, Fixed([5], [-1], [1.0])]).propose(CONTEXT, 4)
    torch.testing.assert_close(tree.scores.exp(), torch.tensor([[1.0, 0.6]]))
    assert MergedDrafter([Fixed([5], [-1], [1.0])] * 2).propose(CONTEXT, 4).tokens.tolist() == [[5]]


def test_the_text_stays_the_targets():
    model = make_model("qwen3")
    target = Target(model)
    drafter = MergedDrafter([DraftModelDrafter(Target(make_model("llama", seed=3)), target), PromptLookupDrafter()])
    for budget in (1, 2, 9):
        result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=20)
        assert result.token_ids == plain_greedy(model, PROMPT, 20)


def test_what_cannot_be_merged_is_named():
    one = Fixed([5, 7], [-1, 0], [1.0, 0.6], taps=(1,))
    with pytest.raises(ValueError, match="at most one drafter may read features of the target, got Fixed and Fixed"):
        MergedDrafter([one, one])
    with pytest.raises(ValueError, match="at least two"):
        MergedDrafter([one])
    with pytest.raises(ValueError, match=r"weights must be above 0 and finite, got \[1, 0\]"):
        MergedDrafter([one, PromptLookupDrafter()], [1, 0])
