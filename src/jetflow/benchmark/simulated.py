"""Simulated acceptance: how fast decoding would be with a head of a given quality, before one is trained.

No figure made with these parts tells anything about a head; they are named `simulated`, and tables refuse to mix them with
measured ones.

Dimension key: D draft levels, K candidates.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jetflow.acceptors import GreedyAcceptor
from jetflow.benchmark.methods import DecoderMethod, Written
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.config import DraftHeadConfig
from jetflow.protocols import DraftContext
from jetflow.targets import Target
from jetflow.trees.expanders import BestFirst
from jetflow.trees.sources import MarginalSource
from jetflow.trees.token_tree import TokenTree

# Layers and block size of a head that nobody described, those of the published ones.
NUM_LAYERS, BLOCK_SIZE = 5, 16
# The laws that shape the trees stay between these, so that trees of extreme rates still hold other tokens.
LOWEST, HIGHEST = 0.05, 0.95


class TrueText:
    """The target's own greedy continuation, which simulated drafters look up.

    Attributes:
        seconds: time spent on it so far, which is no part of decoding.
    """

    def __init__(self, target: Target):
        self.seconds = 0.0
        self._decoder = SpeculativeDecoder(target, PromptLookupDrafter(), GreedyAcceptor(), 1)
        self._known: list[int] = []
        self._ends = False

    def after(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns the `count` tokens that follow `token_ids`; fewer where the text ends before."""
        length = len(token_ids)
        if self._known[:length] != list(token_ids) or not (self._ends or len(self._known) >= length + count):
            begin = time.perf_counter()
            result = self._decoder.generate(list(token_ids), max_new_tokens=count)
            self._known, self._ends = [*token_ids, *result.token_ids], len(result.token_ids) < count
            self.seconds += time.perf_counter() - begin
        return self._known[length : length + count]


class SimulatedDrafter:
    """Drafts with the cost of a real head and an acceptance that is asked for. The text stays the target's.

    Each round runs a pass of a head with random weights, its output embedding and the choice of candidates. Then, at each
    depth, the likeliest candidate becomes the target's own next token with the probability `acceptance`; otherwise that
    token is not among the candidates. The tree is the best one for laws that give the first candidate the probability
    `acceptance` (within 0.05 and 0.95) and each further one half of what the one before has.

    Args:
        target: the model.
        config: sizes of the head; see `simulated_config`. A correction is no part of the cost.
        truth: the target's own text.
        acceptance: share of the first candidates, along an accepted path, that are accepted.
        seed: of weights and draws; a text's draws depend on this and its prompt alone.

    Raises:
        ValueError: `acceptance` is not in [0, 1].
    """

    def __init__(self, target: Target, config: DraftHeadConfig, truth: TrueText, acceptance: float, seed: int = 0):
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plain = replace(config, correction=None, published=replace(config.published, selector_candidates=None))
            head = BlockDraftHead(plain)
        self._inner = ParallelDrafter(head.to(target.device, target.dtype).eval(), target)
        self.taps = self._inner.taps
        self._depth, self._truth, self._acceptance, self._seed = config.depth, truth, acceptance, seed
        self._expander = BestFirst()
        self._draws: random.Random | None = None

    def reset(self, batch_size: int) -> None:
        """Forgets the last text."""
        self._inner.reset(batch_size)
        self._draws = None

    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Gives the committed tokens to the head, as `ParallelDrafter` does."""
        self._inner.observe(token_ids, features, num_tokens)

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns a tree of at most `budget` nodes for one row."""
        depth = min(self._depth, context.max_depth, budget - 1)
        if depth < 1:
            return TokenTree.root_only(context.root_tokens)
        logits = self._inner.draft_logits(context.root_tokens, depth)
        context.mark("build")
        # One candidate more than is kept: the true token is taken out.
        drafted = MarginalSource.from_logits(logits, budget).tokens[0].tolist()
        token_ids = context.token_ids[0]
        if self._draws is None:
            self._draws = random.Random(f"{self._seed} {token_ids}")
        hits = [self._draws.random() < self._acceptance for _ in range(depth)]
        truth = self._truth.after(token_ids, context.max_depth + 1)[:depth]
        for level, (token, hit) in enumerate(zip(truth, hits, strict=False)):
            others = [other for other in drafted[level] if other != token]
            drafted[level] = [token, *others] if hit else others
        width = min(map(len, drafted))
        tokens = torch.tensor([[row[: min(width, budget - 1)] for row in drafted]], device=context.root_tokens.device)
        return self._expander(context.root_tokens, MarginalSource(tokens, self._laws(tokens)), budget)

    def _laws(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [1, D, K] that shape the tree."""
        first = min(max(self._acceptance, LOWEST), HIGHEST)
        ranks = torch.arange(tokens.shape[2], device=tokens.device, dtype=torch.float32)
        probs = torch.where(ranks == 0, first, (1 - first) * 0.5**ranks)
        return probs.log().expand(tokens.shape).contiguous()


class SimulatedMethod:
    """A decoder with a `SimulatedDrafter`, one text at a time; the time that its look-ups took is taken off."""

    def __init__(self, decoder: SpeculativeDecoder, truth: TrueText):
        self._method, self._truth = DecoderMethod(decoder), truth

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, seed: int) -> list[Written]:
        before = self._truth.seconds
        (written,) = self._method(prompts, max_new_tokens, seed)
        spent = self._truth.seconds - before
        phases = dict(written.phases)
        # Look-ups happen while a tree is built.
        if "build" in phases:
            phases["build"] -= spent
        return [replace(written, seconds=written.seconds - spent, phases=phases)]


def simulated_config(target: Target) -> DraftHeadConfig:
    """Returns the config of a head for `target`: five layers, fewer where the target is shallow, and a block of 16."""
    layers = min(NUM_LAYERS, max(1, target.num_layers - 3))
    return DraftHeadConfig.for_target(
        target.config, num_layers=layers, block_size=BLOCK_SIZE, mask_token_id=target.vocab_size - 1
    )
