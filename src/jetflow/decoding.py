"""SpeculativeDecoder: draft a tree, verify it, accept a path, commit it.

Dimension key: B batch (1 here), N nodes, P path length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from jetflow.acceptors import GreedyAcceptor
from jetflow.paged_cache import PagePool
from jetflow.protocols import Acceptance, Acceptor, BudgetPolicy, DraftContext, Drafter
from jetflow.results import GenerationResult, Round, RoundStats
from jetflow.stopping import FinishReason, keep_until_stop
from jetflow.targets import Target
from jetflow.timing import PhaseTimer
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier

Prompt = str | Sequence[int]


class SpeculativeDecoder:
    """Writes exactly what the target alone would write, several tokens per target pass.

    Args:
        target: the frozen model.
        drafter: proposes a tree each round; anything with `propose(context, budget)`.
        acceptor: which path the target follows; greedy when absent.
        budget: most nodes that the target verifies in one round, root included, or a budget policy. With 1 the same
            code is plain autoregressive decoding.
        prefill_chunk: most prompt tokens in one pass.
        pages: memory for a paged cache, shared with other decoders if you like; a contiguous one when absent.

    Raises:
        ValueError: `budget` is below 1, or the drafter taps layers that the target does not have.

    Example:
        >>> decoder = SpeculativeDecoder(target, drafter, budget=16)  # doctest: +SKIP
        >>> decoder.generate("Tom has 3 apples", max_new_tokens=64).text  # doctest: +SKIP
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        acceptor: Acceptor | None = None,
        budget: int | BudgetPolicy = 16,
        *,
        prefill_chunk: int = 2048,
        pages: PagePool | None = None,
    ):
        max_nodes = budget if isinstance(budget, int) else budget.max_nodes
        if max_nodes < 1:
            raise ValueError(f"budget must be at least 1 (the root), got {max_nodes}")
        self.target = target
        self.drafter = drafter
        self.acceptor = acceptor or GreedyAcceptor()
        self.max_nodes = max_nodes
        self.policy = None if isinstance(budget, int) else budget
        self._verifier = TreeVerifier(target, taps=getattr(drafter, "taps", ()), prefill_chunk=prefill_chunk, pages=pages)

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = ...,
        eos_token_id: int | Collection[int] | None = ...,
        seed: int | None = ...,
        streamer: Any = ...,
        on_round: Callable[[Round], None] | None = ...,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        max_new_tokens: int = ...,
        eos_token_id: int | Collection[int] | None = ...,
        seed: int | None = ...,
        streamer: Any = ...,
        on_round: Callable[[Round], None] | None = ...,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        *,
        max_new_tokens: int = 256,
        eos_token_id: int | Collection[int] | None = None,
        seed: int | None = None,
        streamer: Any = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Continues a prompt, or several one after another.

        Args:
            prompt: text, token ids, or a list of either. Text is tokenised as it is, special tokens added.
            max_new_tokens: most new tokens; also capped by the positions that the target is made for.
            eos_token_id: id or ids that end the text; the target's own when absent.
            seed: makes sampling repeatable; the global random state is never touched.
            streamer: a transformers streamer; gets the prompt, then each round's tokens, then `end()`.
            on_round: called after each round with its tree, path and kept tokens.

        Returns:
            One result, or a list of them for a list of prompts.

        Raises:
            ValueError: an empty or too long prompt, an id outside the vocabulary, `max_new_tokens` below 1, text
                without a tokenizer, or logits that are NaN.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        stops = self._stops(eos_token_id)
        generator = torch.Generator(device=self.target.device)
        prompts: list[Any] = [prompt] if _is_one_prompt(prompt) else list(prompt)
        if not prompts:
            raise ValueError("prompt must hold at least one token (or one prompt), got an empty list")
        all_ids = [self._token_ids(one) for one in prompts]
        results = []
        for token_ids in all_ids:
            # Every prompt starts from the seed, so that a result does not depend on its neighbours.
            generator.manual_seed(seed) if seed is not None else generator.seed()
            try:
                results.append(self._run(token_ids, max_new_tokens, stops, generator, streamer, on_round))
            finally:
                self._verifier.release()
        return results[0] if _is_one_prompt(prompt) else results

    def _run(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stops: Collection[int],
        generator: torch.Generator,
        streamer: Any,
        on_round: Callable[[Round], None] | None,
    ) -> GenerationResult:
        begin = time.perf_counter()
        allowance = min(max_new_tokens, self.target.max_positions - len(prompt_ids))
        emit = (lambda ids: streamer.put(torch.tensor(ids))) if streamer else (lambda ids: None)
        emit(prompt_ids)
        token_ids = [*prompt_ids, self._prefill(prompt_ids, generator)]
        kept, reason = keep_until_stop(token_ids[-1:], eos_token_ids=stops, allowance=allowance)
        emit(kept)
        prefill_seconds = time.perf_counter() - begin
        rounds: list[RoundStats] = []
        timer = PhaseTimer(self.target.device)
        while reason is None:
            left = allowance - (len(token_ids) - len(prompt_ids))
            tree, acceptance, tokens = self._round(token_ids, left, rounds, generator, timer)
            kept, reason = keep_until_stop(tokens, eos_token_ids=stops, allowance=left)
            token_ids.extend(kept)
            stats = RoundStats(tree.max_nodes, len(tokens) - 1, len(kept), timer.stop())
            rounds.append(stats)
            emit(kept)
            if on_round:
                on_round(Round(tree, acceptance, kept, stats))
        if streamer:
            streamer.end()
        return self._result(token_ids, len(prompt_ids), reason, rounds, prefill_seconds, time.perf_counter() - begin)

    def _prefill(self, prompt_ids: list[int], generator: torch.Generator) -> int:
        """Commits the prompt and returns the first new token, through the acceptor and a tree of the root alone."""
        ids = torch.tensor([prompt_ids], device=self.target.device)
        lengths = torch.tensor([len(prompt_ids)], device=self.target.device)
        logits, features = self._verifier.prefill(ids, lengths)
        if hasattr(self.drafter, "reset"):
            self.drafter.reset(1)
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(ids, features, lengths)
        acceptance = self.acceptor(TokenTree.root_only(ids[:, -1]), logits, generator=generator)
        return _checked_bonus(acceptance, len(prompt_ids))

    def _round(
        self,
        token_ids: list[int],
        left: int,
        rounds: list[RoundStats],
        generator: torch.Generator,
        timer: PhaseTimer,
    ) -> tuple[TokenTree, Acceptance, list[int]]:
        """One round; returns the tree, the accepted path, and accepted tokens with the bonus token."""
        timer.mark("draft")
        tree = self._propose(token_ids, left, rounds, timer)
        timer.mark("verify")
        logits, features = self._verifier.verify(tree)
        timer.mark("accept")
        acceptance = self.acceptor(tree, logits, generator=generator)
        bonus = _checked_bonus(acceptance, len(token_ids))
        timer.mark("commit")
        self._verifier.commit(acceptance)
        path = acceptance.path[:, : int(acceptance.num_accepted[0]) + 1]
        committed = tree.tokens.gather(1, path)
        if hasattr(self.drafter, "observe"):
            path_features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
            self.drafter.observe(committed, path_features, acceptance.num_accepted + 1)
        return tree, acceptance, [*committed[0, 1:].tolist(), bonus]

    def _propose(self, token_ids: list[int], left: int, rounds: list[RoundStats], timer: PhaseTimer) -> TokenTree:
        root = torch.tensor([token_ids[-1]], device=self.target.device)
        if self.max_nodes == 1:
            return TokenTree.root_only(root)
        position = torch.tensor([len(token_ids) - 1], device=self.target.device)
        context = DraftContext(root, position, [token_ids], max_depth=left - 1, mark=timer.mark)
        tree = self.drafter.propose(context, self.max_nodes)
        _check_tree(tree, token_ids[-1], self.max_nodes)
        if self.policy is not None:
            tree = tree.first(self.policy(tree.scores, [stats.num_accepted for stats in rounds]))
        return tree

    def _result(
        self,
        token_ids: list[int],
        num_prompt_tokens: int,
        reason: FinishReason,
        rounds: list[RoundStats],
        prefill_seconds: float,
        seconds: float,
    ) -> GenerationResult:
        new_ids = token_ids[num_prompt_tokens:]
        tokenizer = self.target.tokenizer
        text = tokenizer.decode(new_ids, skip_special_tokens=True) if tokenizer else None
        return GenerationResult(new_ids, text, reason, num_prompt_tokens, rounds, prefill_seconds, seconds)

    def _stops(self, eos_token_id: int | Collection[int] | None) -> Collection[int]:
        if eos_token_id is None:
            return self.target.eos_token_ids
        return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.target.tokenizer is None:
                raise ValueError("prompt is text, but the target has no tokenizer; pass token ids")
            prompt = self.target.tokenizer(prompt).input_ids
        ids = [int(token) for token in prompt]
        vocab_size, limit = self.target.vocab_size, self.target.max_positions
        if not ids:
            raise ValueError("prompt must hold at least one token, got none")
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"prompt token {wrong[0]} must be in [0, {vocab_size}), the target's vocabulary")
        if len(ids) >= limit:
            raise ValueError(f"prompt has {len(ids)} tokens, but the target allows {limit} including the answer")
        return ids


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, Tensor):
        return prompt.dim() == 1
    return bool(prompt) and isinstance(prompt[0], int)


def _checked_bonus(acceptance: Acceptance, position: int) -> int:
    bonus = int(acceptance.bonus[0])
    if bonus < 0:
        raise ValueError(f"the target's logits after {position} tokens are NaN or all -inf; check its weights and dtype")
    return bonus


def _check_tree(tree: TokenTree, root_token: int, budget: int) -> None:
    """Guards the seam where users plug in drafters of their own."""
    if tree.batch_size != 1 or tree.max_nodes > budget:
        raise ValueError(f"the drafter must return one tree of at most {budget} nodes, got shape {list(tree.tokens.shape)}")
    if int(tree.tokens[0, 0]) != root_token:
        raise ValueError(f"node 0 of the drafter's tree must be the root token {root_token}, got {int(tree.tokens[0, 0])}")
    if bool(tree.scores.isnan().any()):
        raise ValueError("the drafter's tree has NaN scores; check the draft head's weights and dtype")
