import math

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import BlockDraftHead, DraftHeadConfig, ParallelDrafter, ReusingDrafter, SpeculativeDecoder, Target, TokenTree
from jetflow.drafters.reuse import seed_trees
from jetflow.protocols import DraftContext

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


def context_of(*rows, max_depth=9):
    roots = torch.tensor([row[-1] for row in rows])
    return DraftContext(roots, torch.tensor([len(row) - 1 for row in rows]), rows, max_depth=max_depth)


class Scripted:
    """Proposes these trees in turn."""

    def __init__(self, *trees):
        self.trees = list(trees)

    def propose(self, context, budget):
        return self.trees.pop(0)


def last_tree():
    """Root 3; 10 and 11 below it, both followed by 20, and below the second 20 come 30 and 31, then 40."""
    tokens = [[3, 10, 11, 20, 20, 30, 31, 40]]
    parents = [[-1, 0, 0, 1, 2, 4, 4, 5]]
    probs = [[1.0, 0.5, 0.4, 0.1, 0.3, 0.2, 0.05, 0.15]]
    return TokenTree.from_parents(tokens, parents, torch.tensor(probs).log())


def test_the_subtree_below_the_bonus_moves_to_the_root():
    # 10 was accepted, and then the target wrote 20: the likelier 20 stands behind 11.
    seed = seed_trees(last_tree(), context_of([3, 10, 20]), [2])
    assert seed.tokens.tolist() == [[20, 30, 31, 40]]
    assert seed.parents.tolist() == [[-1, 0, 0, 1]]
    torch.testing.assert_close(seed.scores.exp(), torch.tensor([[1.0, 0.2 / 0.3, 0.05 / 0.3, 0.15 / 0.3]]))
    # Children of the new root have at most the probability 1.
    assert float(seed.scores[0, 1:3].exp().sum()) <= 1


def test_what_the_last_tree_does_not_hold_is_no_seed():
    # Two rows: a token that stands nowhere, and one that stands at another depth.
    last = TokenTree(*(torch.cat([one, one]) for one in list(vars(last_tree()).values())[:5]))
    seeds = seed_trees(last, context_of([3, 10, 50], [3, 30]), [2, 1])
    assert seeds.num_nodes.tolist() == [1, 1]
    # What could not be kept for want of length is left out.
    short = seed_trees(last_tree(), context_of([3, 10, 20], max_depth=1), [2])
    assert short.tokens.tolist() == [[20, 30, 31]]


def test_fresh_tree_and_seed_are_mixed():
    fresh = TokenTree.from_parents([[20, 30, 50]], [[-1, 0, 0]], torch.tensor([[1.0, 0.6, 0.3]]).log())
    drafter = ReusingDrafter(Scripted(last_tree(), fresh, fresh), weight=0.25)
    drafter.reset(1)
    assert torch.equal(drafter.propose(context_of([3]), 8).tokens, last_tree().tokens)
    tree = drafter.propose(context_of([3, 10, 20]), 4)
    expected = {30: 0.75 * 0.6 + 0.25 * 2 / 3, 50: 0.75 * 0.3, 40: 0.25 * 0.5}
    assert tree.tokens.tolist() == [[20, 30, 50, 40]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    for node in range(1, 4):
        assert float(tree.scores[0, node]) == pytest.approx(math.log(expected[int(tree.tokens[0, node])]), abs=1e-6)
    # After a reset nothing is left.
    drafter.reset(1)
    torch.testing.assert_close(drafter.propose(context_of([3, 10, 20]), 4).scores, fresh.scores)


def test_the_text_stays_the_targets():
    model = make_model("qwen3")
    target = Target(model)
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(target.config, num_layers=2, block_size=6, mask_token_id=60, taps=(0, 1, 3))
    drafter = ReusingDrafter(ParallelDrafter(BlockDraftHead(config).eval(), target), weight=0.5)
    for budget in (1, 2, 40):
        result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=25)
        assert result.token_ids == plain_greedy(model, PROMPT, 25)


@pytest.mark.parametrize("weight", [0.0, 1.0, float("nan")])
def test_weights_outside_the_open_interval_are_refused(weight):
    with pytest.raises(ValueError, match="weight must be between 0 and 1"):
        ReusingDrafter(Scripted(), weight)
