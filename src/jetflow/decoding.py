"""SpeculativeDecoder: draft a tree, verify it, accept a path, commit it; see `RunningBatch` for the rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from jetflow.acceptors import GreedyAcceptor
from jetflow.batch import RunningBatch
from jetflow.graphs import GraphSettings
from jetflow.paged_cache import PagePool
from jetflow.protocols import Acceptor, BudgetPolicy, Drafter
from jetflow.request import Prompt, Request, RequestSettings, prompt_ids
from jetflow.results import GenerationResult, Round
from jetflow.targets import Target
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
        self._graphs, self._fixed_width = graphs, fixed_width
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
        batch_size: int = ...,
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
        batch_size: int = ...,
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
        batch_size: int = 1,
        seed: int | None = None,
        streamer: Any = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Continues a prompt, or several, `batch_size` at a time.

        All of it runs under `torch.inference_mode`: parts of your own, processors and callbacks, too.

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
            batch_size: so many prompts share each pass; a greedy text is the same in any company, a sampled one is of the same
                law but another draw. Texts that end make room for no others.
            seed: makes sampling repeatable; the global random state is never touched.
            streamer: a transformers streamer; gets the prompt, then each round's tokens, then `end()`.
            on_round: called after each round, for each text, with its tree, path and kept tokens.

        Returns:
            One result, or a list of them for a list of prompts.

        Raises:
            ValueError: an empty or too long prompt, an id outside the vocabulary, `max_new_tokens` below 1, text or stop
                strings without a tokenizer, settings that exclude each other or have no meaning here, a processor with
                state, logits that are NaN, more tokens than `graphs` keep room for, `batch_size` below 1, or above 1 beside a
                streamer, `fixed_width`, or a drafter that takes one text at a time.
        """
        settings = RequestSettings(
            max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, stop_strings=stop_strings,
            logits_processors=logits_processors, generation_config=generation_config, log_probs=log_probs,
        )  # fmt: skip
        prompts: list[Any] = [prompt] if _is_one_prompt(prompt) else list(prompt)
        if not prompts:
            raise ValueError("prompt must hold at least one token (or one prompt), got an empty list")
        self._check_batch(min(batch_size, len(prompts)), streamer)
        requests = [
            Request(prompt_ids(one, self.target), settings, self.target, self._given_acceptor, index)
            for index, one in enumerate(prompts)
        ]
        if self._graphs is not None:
            for request in requests:
                self._graphs.check_room(request.num_prompt_tokens + request.left + self._graphs.bucket(self.max_nodes))
        generator = torch.Generator(device=self.target.device)
        emit = (lambda ids: streamer.put(torch.tensor(ids))) if streamer else (lambda ids: None)
        for start in range(0, len(requests), batch_size):
            # So that a result does not depend on other batches.
            generator.manual_seed(seed) if seed is not None else generator.seed()
            batch = RunningBatch(
                requests[start : start + batch_size], self.target, self.drafter, self._verifier, self.max_nodes, self.policy,
                generator,
            )  # fmt: skip
            try:
                batch.run(emit, on_round)
            finally:
                self._verifier.release()
            if streamer:
                streamer.end()
        results = [request.result(self.target.tokenizer) for request in requests]
        return results[0] if _is_one_prompt(prompt) else results

    def _check_batch(self, size: int, streamer: Any) -> None:
        """Refuses what takes one text at a time."""
        if size < 1:
            raise ValueError(f"batch_size must be at least 1, got {size}")
        if size == 1:
            return
        drafter = type(self.drafter).__name__
        if hasattr(self.drafter, "reset") and not hasattr(self.drafter, "keep_rows"):
            raise ValueError(f"batch_size above 1 needs a drafter with keep_rows(rows), which {drafter} lacks")
        if streamer is not None:
            raise ValueError(f"a streamer shows one text at a time and needs batch_size=1, got {size} prompts at once")
        if self._fixed_width is not None:
            raise ValueError(f"fixed_width={self._fixed_width} takes one text at a time and needs batch_size=1, got {size}")


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, Tensor):
        return prompt.dim() == 1
    return bool(prompt) and isinstance(prompt[0], int)
