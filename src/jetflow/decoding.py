"""SpeculativeDecoder: draft a tree, verify it, accept a path, commit it.

Dimension key: B batch (1 here), N nodes, P path length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from jetflow.acceptors import GreedyAcceptor
from jetflow.graphs import GraphSettings
from jetflow.logprobs import TokenLogProbs, log_probs_of
from jetflow.paged_cache import PagePool
from jetflow.protocols import Acceptance, Acceptor, BudgetPolicy, DraftContext, Drafter
from jetflow.request import Prompt, Request, RequestSettings, prompt_ids
from jetflow.results import GenerationResult, Round, RoundStats
from jetflow.stopping import FinishReason
from jetflow.targets import Target
from jetflow.timing import PhaseTimer
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from jetflow.processing import LogitsProcessor


class SpeculativeDecoder:
    """Writes exactly what the target alone would write, several tokens per target pass.

    Args:
        target: the frozen model.
        drafter: proposes a tree each round; anything with `propose(context, budget)`.
        acceptor: which path the target follows; when absent greedy, or sampling where a call's `generation_config` samples.
        budget: most nodes that the target verifies in one round, root included, or a budget policy. With 1 the same
            code is plain autoregressive decoding.
        prefill_chunk: most prompt tokens in one pass.
        pages: memory for a paged cache, shared with other decoders if you like; a contiguous one when absent.
        fixed_width: run every tree pass over so many nodes, so that greedy text in bfloat16 does not depend on trees; slow, see
            `TreeVerifier`.
        graphs: replay tree passes as CUDA graphs, see `TreeVerifier`; a drafter has such a setting of its own.

    Raises:
        ValueError: `budget` is below 1 or above the largest bucket of `graphs`, the drafter taps layers that the target does
            not have, or `fixed_width` or `graphs` cannot be honoured.

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
        fixed_width: int | None = None,
        graphs: GraphSettings | None = None,
    ):
        max_nodes = budget if isinstance(budget, int) else budget.max_nodes
        if max_nodes < 1:
            raise ValueError(f"budget must be at least 1 (the root), got {max_nodes}")
        self.target = target
        self.drafter = drafter
        self._given_acceptor = acceptor
        self.acceptor = acceptor or GreedyAcceptor()
        self.max_nodes = max_nodes
        self.policy = None if isinstance(budget, int) else budget
        if fixed_width is not None and fixed_width < max_nodes:
            raise ValueError(f"fixed_width={fixed_width} must be at least the budget, {max_nodes}")
        if graphs is not None:
            graphs.bucket(max_nodes)  # Refused where no bucket is as large.
        self._graphs = graphs
        self._verifier = TreeVerifier(
            target, taps=getattr(drafter, "taps", ()), prefill_chunk=prefill_chunk, pages=pages, fixed_width=fixed_width,
            graphs=graphs,
        )  # fmt: skip

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = ...,
        eos_token_id: int | Collection[int] | None = ...,
        stop_strings: str | Sequence[str] = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        generation_config: GenerationConfig | None = ...,
        log_probs: int | None = ...,
        seed: int | None = ...,
        streamer: Any = ...,
        on_round: Callable[[Round], None] | None = ...,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        max_new_tokens: int | None = ...,
        eos_token_id: int | Collection[int] | None = ...,
        stop_strings: str | Sequence[str] = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        generation_config: GenerationConfig | None = ...,
        log_probs: int | None = ...,
        seed: int | None = ...,
        streamer: Any = ...,
        on_round: Callable[[Round], None] | None = ...,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Collection[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        generation_config: GenerationConfig | None = None,
        log_probs: int | None = None,
        seed: int | None = None,
        streamer: Any = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Continues a prompt, or several one after another.

        Args:
            prompt: text, token ids, or a list of either. Text is tokenised as it is, special tokens added.
            max_new_tokens: most new tokens, 256 when absent; also capped by the positions that the target is made for.
            eos_token_id: id or ids (a tensor, too) that end the text; the target's own when absent.
            stop_strings: texts that end it; the token that completes one is kept.
            logits_processors: change the target's logits before the acceptor sees them, each node's on its own path;
                anything with transformers' call `(token_ids, scores) -> scores` that keeps no state.
            generation_config: transformers' settings, with the meaning that they have in `target.model.generate`, the
                model's own defaults included; what has no meaning on trees is refused. Excludes `max_new_tokens`,
                `eos_token_id`, `stop_strings` and `logits_processors`.
            log_probs: also return log-probabilities of each new token and of so many likeliest ones (0 for none).
            seed: makes sampling repeatable; the global random state is never touched.
            streamer: a transformers streamer; gets the prompt, then each round's tokens, then `end()`.
            on_round: called after each round with its tree, path and kept tokens.

        Returns:
            One result, or a list of them for a list of prompts.

        Raises:
            ValueError: an empty or too long prompt, an id outside the vocabulary, `max_new_tokens` below 1, text or stop
                strings without a tokenizer, settings that exclude each other or have no meaning here, a processor with
                state, logits that are NaN, or more tokens than `graphs` keep room for.
        """
        settings = RequestSettings(
            max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, stop_strings=stop_strings,
            logits_processors=logits_processors, generation_config=generation_config, log_probs=log_probs,
        )  # fmt: skip
        generator = torch.Generator(device=self.target.device)
        prompts: list[Any] = [prompt] if _is_one_prompt(prompt) else list(prompt)
        if not prompts:
            raise ValueError("prompt must hold at least one token (or one prompt), got an empty list")
        requests = [Request(prompt_ids(one, self.target), settings, self.target, self._given_acceptor) for one in prompts]
        if self._graphs is not None:
            for request in requests:
                self._graphs.check_room(request.num_prompt_tokens + request.left + self._graphs.bucket(self.max_nodes))
        results = []
        for request in requests:
            # So that a result does not depend on its neighbours.
            generator.manual_seed(seed) if seed is not None else generator.seed()
            try:
                results.append(self._run(request, generator, streamer, on_round))
            finally:
                self._verifier.release()
        return results[0] if _is_one_prompt(prompt) else results

    def _run(
        self, request: Request, generator: torch.Generator, streamer: Any, on_round: Callable[[Round], None] | None
    ) -> GenerationResult:
        begin = time.perf_counter()
        emit = (lambda ids: streamer.put(torch.tensor(ids))) if streamer else (lambda ids: None)
        emit(request.token_ids)
        found = self._prefill(request, generator)
        kept, reason = request.keep([found.token])
        emit(kept)
        log_probs = [found]
        prefill_seconds = time.perf_counter() - begin
        rounds: list[RoundStats] = []
        timer = PhaseTimer(self.target.device)
        while reason is None:
            tree, acceptance, tokens, more = self._round(request, rounds, generator, timer)
            kept, reason = request.keep(tokens)
            log_probs += more[: len(kept)]
            stats = RoundStats(tree.max_nodes, len(tokens) - 1, len(kept), timer.stop())
            rounds.append(stats)
            emit(kept)
            if on_round:
                on_round(Round(tree, acceptance, kept, stats))
        if streamer:
            streamer.end()
        return self._result(request, reason, rounds, log_probs, prefill_seconds, time.perf_counter() - begin)

    def _prefill(self, request: Request, generator: torch.Generator) -> TokenLogProbs:
        """Commits the prompt and returns the first new token, through the acceptor and a tree of the root alone."""
        ids = torch.tensor([request.token_ids], device=self.target.device)
        lengths = torch.tensor([len(request.token_ids)], device=self.target.device)
        logits, features = self._verifier.prefill(ids, lengths)
        if hasattr(self.drafter, "reset"):
            self.drafter.reset(1)
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(ids, features, lengths)
        tree = TokenTree.root_only(ids[:, -1])
        processed = request.process(tree, logits)
        acceptance = request.acceptor(tree, processed, generator=generator)
        bonus = _checked_bonus(acceptance, len(request.token_ids))
        return log_probs_of(logits[0], processed[0], [0], [bonus], request.num_likeliest)[0]

    def _round(
        self, request: Request, rounds: list[RoundStats], generator: torch.Generator, timer: PhaseTimer
    ) -> tuple[TokenTree, Acceptance, list[int], list[TokenLogProbs]]:
        """One round; returns the tree, the accepted path, accepted tokens with the bonus token, and their log-probs."""
        timer.mark("draft")
        tree = self._propose(request, rounds, generator, timer)
        timer.mark("verify")
        logits, features = self._verifier.verify(tree)
        timer.mark("accept")
        processed = request.process(tree, logits)
        acceptance = request.acceptor(tree, processed, generator=generator)
        bonus = _checked_bonus(acceptance, len(request.token_ids))
        timer.mark("commit")
        self._verifier.commit(acceptance)
        path = acceptance.path[:, : int(acceptance.num_accepted[0]) + 1]
        committed = tree.tokens.gather(1, path)
        if hasattr(self.drafter, "observe"):
            path_features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
            self.drafter.observe(committed, path_features, acceptance.num_accepted + 1)
        tokens = [*committed[0, 1:].tolist(), bonus]
        found = log_probs_of(logits[0], processed[0], path[0].tolist(), tokens, request.num_likeliest)
        return tree, acceptance, tokens, found

    def _propose(self, request: Request, rounds: list[RoundStats], generator: torch.Generator, timer: PhaseTimer) -> TokenTree:
        token_ids = request.token_ids
        root = torch.tensor([token_ids[-1]], device=self.target.device)
        if self.max_nodes == 1:
            return TokenTree.root_only(root)
        position = torch.tensor([len(token_ids) - 1], device=self.target.device)
        context = DraftContext(root, position, [token_ids], max_depth=request.left - 1, mark=timer.mark, generator=generator)
        tree = self.drafter.propose(context, self.max_nodes)
        _check_tree(tree, token_ids[-1], self.max_nodes)
        if self.policy is not None:
            if tree.laws is not None:
                raise ValueError("a budget policy cuts trees by the scores of their tokens, which drawn children forbid")
            tree = tree.first(self.policy(tree.scores, [stats.num_accepted for stats in rounds]))
        return request.prune(tree)

    def _result(
        self,
        request: Request,
        reason: FinishReason,
        rounds: list[RoundStats],
        log_probs: list[TokenLogProbs],
        prefill_seconds: float,
        seconds: float,
    ) -> GenerationResult:
        tokenizer = self.target.tokenizer
        text = tokenizer.decode(request.new_ids, skip_special_tokens=True) if tokenizer else None
        return GenerationResult(
            request.new_ids, text, reason, request.num_prompt_tokens, rounds, prefill_seconds, seconds,
            None if request.num_likeliest is None else log_probs,
        )  # fmt: skip


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
