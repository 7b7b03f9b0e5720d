"""A language of six tokens with known laws: many rounds at once, and the chi-square of what they emit."""

from dataclasses import dataclass

import torch
from scipy.stats import chi2

from jetflow import Chain, FixedShape, MarginalSource, PairwiseSource
from jetflow.acceptors.target_law import TargetLaw
from jetflow.trees.sampling import ChildSampling

VOCAB, LEVELS = 6, 3
SHAPE = FixedShape([-1, 0, 0, 0, 1, 1, 2, 4], [0, 0, 1, 2, 0, 1, 0, 0])
ROOT = 4


@dataclass
class Toy:
    """Target laws by the last two tokens, draft laws by depth (or by depth and parent)."""

    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    pair_logits: torch.Tensor

    def logits_of(self, tree):
        """Target logits [B, N, V] behind every node of a tree."""
        before = torch.where(tree.parents >= 0, tree.tokens.gather(1, tree.parents.clamp(min=0)), 0)
        return self.target_logits[before, tree.tokens]

    def source(self, rounds, *, conditional):
        if not conditional:
            return MarginalSource.from_logits(self.draft_logits.expand(rounds, -1, -1), VOCAB)
        tokens = torch.arange(VOCAB).expand(rounds, LEVELS, -1)
        first = self.draft_logits[0, 0].log_softmax(-1).expand(rounds, -1)
        table = self.pair_logits.log_softmax(-1).expand(rounds, -1, -1, -1)
        return PairwiseSource(tokens, first, table)


def make_toy(seed=0, sharpness=1.5, noise=1.0):
    generator = torch.Generator().manual_seed(seed)
    target = sharpness * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    draft = target.mean((0, 1)) + noise * torch.randn(1, LEVELS, VOCAB, generator=generator)
    pair = target.mean(0) + noise * torch.randn(LEVELS - 1, VOCAB, VOCAB, generator=generator)
    return Toy(target, draft, pair)


def build_trees(toy, expander, *, rounds, seed=1, sampling=None, conditional=False, budget=8):
    """Builds the trees of many rounds behind one root."""
    roots = torch.full((rounds,), ROOT)
    source = toy.source(rounds, conditional=conditional)
    if sampling is None:
        return expander(roots, source, budget)
    return sampling.build(expander, roots, source, budget, torch.Generator().manual_seed(seed))


def rounds_of(toy, acceptor, expander, **settings):
    """Runs many first rounds and returns trees and acceptances."""
    tree = build_trees(toy, expander, **settings)
    return tree, acceptor(tree, toy.logits_of(tree), generator=torch.Generator().manual_seed(7))


def p_value(toy, tree, acceptance, law, seed=2):
    """Chi-square test of the first two tokens of every round against the target's law."""
    generator = torch.Generator().manual_seed(seed)
    path, count = acceptance.path, acceptance.num_accepted
    tokens = tree.tokens.gather(1, path)
    accepted = [torch.where(count > i, tokens[:, min(i + 1, tokens.shape[1] - 1)], -1) for i in range(2)]
    first = torch.where(count >= 1, accepted[0], acceptance.bonus)
    # A round of one token is followed by a draw of the target alone.
    alone = torch.multinomial(law(toy.target_logits[ROOT, first]), 1, generator=generator)[:, 0]
    second = torch.where(count >= 2, accepted[1], torch.where(count == 1, acceptance.bonus, alone))
    first_law = law(toy.target_logits[0, ROOT][None])[0]
    expected = (first_law[:, None] * law(toy.target_logits[ROOT])).flatten().double()
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB**2).double()
    expected = expected / expected.sum() * len(first)
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    # Cells with few expected draws are put together.
    rare = expected < 10
    pairs = [(observed[~rare], expected[~rare])]
    if bool(rare.any()) and float(expected[rare].sum()) > 0:
        pairs.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    observed, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(observed) - 1))


def tau(acceptance):
    return float(acceptance.num_accepted.double().mean()) + 1


__all__ = ["ROOT", "SHAPE", "VOCAB", "Chain", "ChildSampling", "TargetLaw", "Toy", "make_toy", "p_value", "rounds_of", "tau"]
