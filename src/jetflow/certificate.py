"""A certificate of losslessness for a user's own target and head: greedy identity, and chi-square tests of every rule.

Dimension key: B rounds, N nodes, R tokens of the reduced vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jetflow.acceptors import BlockVerification, RecursiveRejection, SamplingAcceptor, TraversalVerification
from jetflow.acceptors.target_law import TargetLaw
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.protocols import Acceptance, Acceptor, TreeExpander
from jetflow.scoring.acceptance_table import AcceptanceTable
from jetflow.targets import Target
from jetflow.trees.expanders import BestFirst, Chain, FixedShape
from jetflow.trees.sampling import ChildSampling
from jetflow.trees.sources import MarginalSource
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier

REDUCED, LEVELS = 8, 2
RULES: dict[str, Callable[[float], Acceptor]] = {
    "match": SamplingAcceptor,
    "recursive rejection": RecursiveRejection,
    "recursive rejection with replacement": lambda temperature: RecursiveRejection(temperature, replacement=True),
    "traversal": TraversalVerification,
    "block": BlockVerification,
}
TREES: dict[str, tuple[TreeExpander, ChildSampling | None]] = {
    "best-first": (BestFirst(), None),
    "drawn, fixed shape": (FixedShape([-1, 0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 0, 1, 0]), ChildSampling()),
    "drawn, acceptance table": (BestFirst(AcceptanceTable()), ChildSampling()),
    "drawn, one fixed child": (BestFirst(AcceptanceTable()), ChildSampling(num_fixed=1)),
    "drawn chain": (Chain(), ChildSampling()),
}


@dataclass(frozen=True)
class Divergence:
    """Where a text left the target's own.

    Attributes:
        prompt: number of the prompt.
        position: index of the first different new token.
        margin: the gap between the two best logits of the target there, in a plain pass.
        explained: whether passes over one token and over several differ by as much on this prompt, so that the two tokens
            tie within the precision of the dtype.
    """

    prompt: int
    position: int
    margin: float
    explained: bool


@dataclass(frozen=True)
class LawTest:
    """A chi-square test of the first two tokens of many simulated rounds against the target's law."""

    rule: str
    tree: str
    temperature: float
    num_rounds: int
    p_value: float


def greedy_identity(
    target: Target, drafter: Any, prompts: Sequence[list[int]], *, budget: int, max_new_tokens: int
) -> tuple[int, list[Divergence]]:
    """Compares tree decoding with plain decoding, token by token.

    Returns:
        How many texts were equal, and the first divergence of each other one.
    """
    plain, tree = SpeculativeDecoder(target, drafter, budget=1), SpeculativeDecoder(target, drafter, budget=budget)
    equal, divergences = 0, []
    for number, prompt in enumerate(prompts):
        expected = plain.generate(prompt, max_new_tokens=max_new_tokens).token_ids
        got = tree.generate(prompt, max_new_tokens=max_new_tokens).token_ids
        if got == expected:
            equal += 1
            continue
        position = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
        margin, noise = _margin_and_noise(target, prompt, expected[: position + 1])
        divergences.append(Divergence(number, position, margin, margin <= 2 * noise))
    return equal, divergences


def law_tests(
    head: BlockDraftHead,
    target: Target,
    prompt: list[int],
    *,
    temperatures: Sequence[float] = (0.3, 1.0, 1.5),
    num_rounds: int = 50_000,
    seed: int = 0,
) -> list[LawTest]:
    """Tests every rule with every kind of tree behind one prompt, on the head's and the target's own laws.

    Both are cut to the target's few likeliest tokens, and the target's laws behind all paths of two of them are computed
    in one pass, so that many rounds can be drawn.
    """
    source, logits, root = _reduced_laws(head, target, prompt)
    tests = []
    for rule, make in RULES.items():
        for name, (expander, sampling) in TREES.items():
            if rule == "block" and name != "drawn chain":
                continue
            for temperature in temperatures:
                generator = torch.Generator().manual_seed(seed)
                roots = torch.full((num_rounds,), root)
                rows = MarginalSource(*(one.expand(num_rounds, -1, -1) for one in source))
                build = expander if sampling is None else _sampled(sampling, expander, generator)
                tree = build(roots, rows, 7)
                acceptance = make(temperature)(tree, _look_up(tree, logits), generator=generator)
                p_value = _p_value(tree, acceptance, logits, TargetLaw(temperature), generator)
                tests.append(LawTest(rule, name, temperature, num_rounds, p_value))
    return tests


def certificate(
    head: BlockDraftHead,
    target: Target,
    prompts: Sequence[list[int]],
    *,
    budget: int = 16,
    max_new_tokens: int = 64,
    num_rounds: int = 50_000,
    names: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs all checks; `passed` says whether they held.

    In float32 and wider every text must be equal; in a shorter dtype a divergence counts as explained where the target's two
    best logits tie within what plain passes of different width differ by. The chi-square tests hold to a family-wise error
    of 1 % (Bonferroni).

    Args:
        head: the head.
        target: its target.
        prompts: token ids of each prompt; the first one is used for the tests of the laws.
        budget: nodes per tree.
        max_new_tokens: length of each text.
        num_rounds: simulated rounds per test.
        names: what the certificate says of target and head.
    """
    from importlib.metadata import version

    equal, divergences = greedy_identity(
        target, ParallelDrafter(head, target), prompts, budget=budget, max_new_tokens=max_new_tokens
    )
    tests = law_tests(head, target, prompts[0], num_rounds=num_rounds)
    exact = target.dtype in (torch.float32, torch.float64)
    level = 0.01 / len(tests)
    identity = not divergences or (not exact and all(one.explained for one in divergences))
    return {
        "passed": identity and all(one.p_value > level for one in tests),
        **(names or {}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "budget": budget,
        "max_new_tokens": max_new_tokens,
        "greedy": {"texts": len(prompts), "equal": equal, "divergences": [asdict(one) for one in divergences]},
        "laws": {"level": level, "tests": [asdict(one) for one in tests]},
        "versions": {name: version(name) for name in ("jetflow", "torch", "transformers")},
    }


def _sampled(sampling: ChildSampling, expander: TreeExpander, generator: torch.Generator) -> TreeExpander:
    return lambda roots, source, budget: sampling.build(expander, roots, source, budget, generator)


@torch.no_grad()
def _margin_and_noise(target: Target, prompt: list[int], text: list[int]) -> tuple[float, float]:
    """Top-2 margin of a plain pass before the last token, and the largest difference between passes over one and many."""
    ids, lengths = torch.tensor([prompt], device=target.device), torch.tensor([len(prompt)], device=target.device)
    steps, block = TreeVerifier(target), TreeVerifier(target)
    one_by_one = [steps.prefill(ids, lengths).logits[0, 0]]
    block.prefill(ids, lengths)
    for token in text[:-1]:
        one_by_one.append(steps.verify(TokenTree.root_only(torch.tensor([token], device=target.device))).logits[0, 0])
        steps.cache.advance([1])
    best = one_by_one[-1].float().topk(2).values
    noise = 0.0
    if len(text) > 1:
        chain = TokenTree.from_parents([text[:-1]], [list(range(-1, len(text) - 2))]).to(target.device)
        together = block.verify(chain).logits[0]
        # Of all logits the best ones count.
        places = torch.stack(one_by_one[1:]).topk(2, dim=-1).indices
        gaps = together.gather(-1, places).float() - torch.stack(one_by_one[1:]).gather(-1, places).float()
        noise = float(gaps.abs().max())
    return float(best[0] - best[1]), noise


@torch.no_grad()
def _reduced_laws(head: BlockDraftHead, target: Target, prompt: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor, int]:
    """The head's laws (tokens, log-probabilities [1, D, R]) and the target's logits [1 + R + R * R, R] over few tokens."""
    device = target.device
    ids, lengths = torch.tensor([prompt[:-1]], device=device), torch.tensor([len(prompt) - 1], device=device)
    root = torch.tensor([prompt[-1]], device=device)
    drafter = ParallelDrafter(head, target)
    verifier = TreeVerifier(target, taps=drafter.taps)
    features = verifier.prefill(ids, lengths).features
    drafter.reset(1)
    drafter.observe(ids, features, lengths)
    first = verifier.verify(TokenTree.root_only(root)).logits[0, 0]
    kept = first.topk(REDUCED).indices.sort().values.tolist()
    tokens = [prompt[-1], *kept, *(token for _ in kept for token in kept)]
    parents = [-1, *([0] * REDUCED), *(1 + i for i in range(REDUCED) for _ in kept)]
    logits = verifier.verify(TokenTree.from_parents([tokens], [parents]).to(device)).logits[0]
    depth = min(LEVELS, head.config.depth)
    drafted = drafter.draft_logits(root, depth)[0, :, kept].float().cpu()
    log_probs, order = drafted.log_softmax(-1).sort(dim=-1, descending=True)
    # Tokens are named by their place among those kept; the root by the place behind them.
    return (order[None], log_probs[None]), logits[:, kept].float().cpu(), REDUCED


def _look_up(tree: TokenTree, logits: Tensor) -> Tensor:
    """The target's logits [B, N, R] behind every node: the root, one token, two tokens."""
    before = tree.tokens.gather(1, tree.parents.clamp(min=0))
    row = torch.where(tree.depths == 1, 1 + tree.tokens, 1 + REDUCED + before * REDUCED + tree.tokens)
    return logits[torch.where(tree.depths == 0, 0, row).clamp(max=len(logits) - 1)]


def _p_value(tree: TokenTree, acceptance: Acceptance, logits: Tensor, law: TargetLaw, generator: torch.Generator) -> float:
    """Chi-square of the first two tokens; a round of one token is followed by a draw of the target alone."""
    tokens = tree.tokens.gather(1, acceptance.path)
    tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, LEVELS)], dim=1)
    count = acceptance.num_accepted
    first = torch.where(count >= 1, tokens[:, 1], acceptance.bonus)
    alone = torch.multinomial(law(logits[1 + first]), 1, generator=generator)[:, 0]
    second = torch.where(count >= 2, tokens[:, 2], torch.where(count == 1, acceptance.bonus, alone))
    expected = (law(logits[:1])[0][:, None] * law(logits[1 : 1 + REDUCED])).flatten().double() * len(first)
    observed = torch.bincount(first * REDUCED + second, minlength=REDUCED**2).double()
    # Cells with few expected draws are put together.
    rare = expected < 10
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    if bool((observed[~used] > 0).any()):
        return 0.0
    return float(torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2))
