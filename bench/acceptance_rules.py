"""Which acceptance rule keeps most tokens, by temperature and by how well the draft fits: `python -m bench.acceptance_rules`.

A language of 32 tokens with random laws behind every pair of tokens; the draft knows one law per depth (as a parallel head
does) or one per depth and parent, both the target's with noise on the logits. Simulated rounds, the same for all rules.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from jetflow import (
    AcceptanceTable,
    BestFirst,
    BlockVerification,
    Chain,
    ChildSampling,
    GreedyAcceptor,
    MarginalSource,
    PairwiseSource,
    RecursiveRejection,
    SamplingAcceptor,
    TraversalVerification,
)

VOCAB, LEVELS, ROOT = 32, 8, 0
TEMPERATURES, NOISES = (0.0, 0.3, 0.6, 1.0), (0.5, 1.0, 2.0)


class Language:
    """Target laws by the last two tokens; draft laws of the same language with `noise` on their logits."""

    def __init__(self, noise: float, rounds: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.target = 2.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        steps = torch.arange(rounds) % VOCAB
        # Every round begins behind another token, and the draft's laws of deeper levels average over what may come between.
        law, laws = self.target[ROOT][steps].softmax(-1), []
        for _ in range(LEVELS):
            laws.append(law)
            law = law @ self.target.mean(0).softmax(-1)
        marginal = torch.stack(laws, dim=1).log()
        self.roots = steps
        self.marginal = marginal + noise * torch.randn(marginal.shape, generator=generator)
        pairs = self.target.mean(0).expand(LEVELS - 1, -1, -1)
        self.pairs = (pairs + noise * torch.randn(pairs.shape, generator=generator)).log_softmax(-1)

    def logits_of(self, tree):
        """Target logits [B, N, V]."""
        before = torch.where(tree.parents >= 0, tree.tokens.gather(1, tree.parents.clamp(min=0)), ROOT)
        return self.target[before, tree.tokens]

    def source(self, temperature: float, conditional: bool):
        """The draft at the target's temperature."""
        if not conditional:
            return MarginalSource.from_logits(self.marginal, VOCAB, temperature=temperature)
        rounds = len(self.roots)
        tokens = torch.arange(VOCAB).expand(rounds, LEVELS, -1)
        first = (self.marginal[:, 0] / temperature).log_softmax(-1)
        return PairwiseSource(tokens, first, (self.pairs / temperature).log_softmax(-1).expand(rounds, -1, -1, -1))


def trees(language: Language, source, budget: int, seed: int) -> dict:
    """The trees that the rules share, by how they are built."""
    kinds = {
        "chain": (Chain(), ChildSampling(), LEVELS + 1),
        "best": (BestFirst(), None, budget),
        "drawn": (BestFirst(AcceptanceTable()), ChildSampling(), budget),
        "one fixed": (BestFirst(AcceptanceTable()), ChildSampling(num_fixed=1), budget),
    }
    built = {}
    for name, (expander, sampling, nodes) in kinds.items():
        if sampling is None:
            built[name] = expander(language.roots, source, nodes)
        else:
            built[name] = sampling.build(expander, language.roots, source, nodes, torch.Generator().manual_seed(seed))
    return built


def rules(temperature: float) -> dict:
    """Name: kind of tree, rule. At temperature 0 the rules with a draft law run as near to it as they can."""
    greedy, temperature = temperature == 0, max(temperature, 1e-3)
    return {
        "chain, token by token": ("chain", RecursiveRejection(temperature)),
        "chain, block": ("chain", BlockVerification(temperature)),
        "best-first, match": ("best", GreedyAcceptor() if greedy else SamplingAcceptor(temperature)),
        "drawn, with replacement": ("drawn", RecursiveRejection(temperature, replacement=True)),
        "drawn, without replacement": ("drawn", RecursiveRejection(temperature)),
        "drawn, one fixed": ("one fixed", RecursiveRejection(temperature)),
        "drawn, traversal": ("drawn", TraversalVerification(temperature)),
    }


def measure(*, rounds: int, budget: int, seeds: int) -> list[dict]:
    """tau of every method in every cell of the grid."""
    cells = []
    for conditional in (False, True):
        for temperature in TEMPERATURES:
            for noise in NOISES:
                taus: dict[str, list[float]] = {}
                for seed in range(seeds):
                    language = Language(noise, rounds, seed)
                    # A greedy target says nothing of the draft's temperature.
                    built = trees(language, language.source(temperature or 1.0, conditional), budget, seed)
                    for name, (kind, rule) in rules(temperature).items():
                        generator = torch.Generator().manual_seed(seed)
                        accepted = rule(built[kind], language.logits_of(built[kind]), generator=generator).num_accepted
                        taus.setdefault(name, []).append(1 + float(accepted.double().mean()))
                law = (Language(noise, rounds, 0).target / max(temperature, 1e-3)).softmax(-1)
                sharpness = round(float(law.amax(-1).mean()), 3)
                means = {name: sum(values) / len(values) for name, values in taus.items()}
                setting = {"conditional": conditional, "temperature": temperature, "noise": noise, "sharpness": sharpness}
                cells.append({**setting, "tau": means})
                print(cells[-1], flush=True)
    return cells


def markdown(cells: list[dict]) -> str:
    """The grid as a table, the best of each row in bold."""
    names = list(cells[0]["tau"])
    lines = ["| laws | T (sharpness) | noise | " + " | ".join(names) + " |", "|" + "---|" * (3 + len(names))]
    for cell in cells:
        best = max(cell["tau"].values())
        values = [f"**{tau:.2f}**" if tau == best else f"{tau:.2f}" for tau in cell["tau"].values()]
        kind = "by parent" if cell["conditional"] else "by depth"
        lines.append(
            f"| {kind} | {cell['temperature']} ({cell['sharpness']:.2f}) | {cell['noise']} | " + " | ".join(values) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures the grid and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/acceptance_rules.json"))
    args = parser.parse_args()
    cells = measure(rounds=args.rounds, budget=args.budget, seeds=args.seeds)
    setting = {"rounds": args.rounds, "budget": args.budget, "seeds": args.seeds, "torch": torch.__version__}
    args.out.write_text(json.dumps({"command": "python -m bench.acceptance_rules", **setting, "cells": cells}, indent=1) + "\n")
    print(markdown(cells))


if __name__ == "__main__":
    main()
