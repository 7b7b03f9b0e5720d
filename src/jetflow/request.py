"""One prompt on its way through a decoder: what it asks for, and the tokens so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jetflow.acceptors import GreedyAcceptor, SamplingAcceptor
from jetflow.generation import ids_of, options_of, stop_string_rule, strings_of
from jetflow.logprobs import TokenLogProbs
from jetflow.processing import LogitsProcessor, PathProcessors
from jetflow.protocols import Acceptor
from jetflow.results import GenerationResult, RoundStats
from jetflow.stopping import FinishReason, keep_until_stop
from jetflow.targets import Target
from jetflow.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from transformers import GenerationConfig

Prompt = str | Sequence[int]
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class RequestSettings:
    """The arguments of `SpeculativeDecoder.generate` that say what is wanted.

    Raises:
        ValueError: `max_new_tokens` is below 1, `log_probs` is negative, or `generation_config` stands beside settings that
            it holds itself.
    """

    max_new_tokens: int | None = None
    eos_token_id: int | Collection[int] | Tensor | None = None
    stop_strings: str | Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    generation_config: GenerationConfig | None = None
    log_probs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.log_probs is not None and self.log_probs < 0:
            raise ValueError(f"log_probs must be at least 0, got {self.log_probs}")
        if self.generation_config is not None:
            beside = {
                "max_new_tokens": self.max_new_tokens is not None,
                "eos_token_id": self.eos_token_id is not None,
                "stop_strings": bool(self.stop_strings),
                "logits_processors": bool(self.logits_processors),
            }
            for name in (name for name, given in beside.items() if given):
                raise ValueError(f"{name} and generation_config exclude each other; set it in the config")


class Request:
    """One prompt and its settings, resolved for a target.

    Args:
        prompt_ids: token ids, at least one.
        settings: what is wanted.
        target: the model.
        acceptor: the rule that the decoder was given, if any.
        index: which prompt of the call it is.

    Attributes:
        token_ids: prompt and kept tokens.
        acceptor: the rule of this request.
        num_likeliest: how many likeliest tokens to list with log-probabilities; None for no log-probabilities.
        finish_reason: why the text has ended; None while it goes on.
        rounds: its rounds so far.
        prefill_seconds: seconds until the first token.
        seconds: seconds until the last one.
    """

    def __init__(
        self, prompt_ids: list[int], settings: RequestSettings, target: Target, acceptor: Acceptor | None, index: int = 0
    ):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.rounds: list[RoundStats] = []
        self.prefill_seconds = self.seconds = 0.0
        self._log_probs: list[TokenLogProbs] = []
        self.num_prompt_tokens = len(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.num_likeliest = settings.log_probs
        processors, strings = tuple(settings.logits_processors), strings_of(settings.stop_strings)
        max_new_tokens = settings.max_new_tokens or DEFAULT_NEW_TOKENS
        self._eos = target.eos_token_ids if settings.eos_token_id is None else ids_of(settings.eos_token_id)
        do_sample = None
        if settings.generation_config is not None:
            options = options_of(settings.generation_config, target, len(prompt_ids))
            processors, strings, self._eos = options.processors, options.stop_strings, options.eos_token_ids
            max_new_tokens, do_sample = options.max_new_tokens, options.do_sample
        self.acceptor = _acceptor(acceptor, do_sample)
        self._processors = PathProcessors(processors, target.vocab_size, target.device) if processors else None
        self._ends = stop_string_rule(target, strings) if strings else None
        self._allowance = min(max_new_tokens, target.max_positions - len(prompt_ids))

    @property
    def left(self) -> int:
        """How many more tokens may be kept."""
        return self._allowance - (len(self.token_ids) - self.num_prompt_tokens)

    @property
    def new_ids(self) -> list[int]:
        """The kept tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def has_processors(self) -> bool:
        """Whether `process` and `prune` do anything."""
        return self._processors is not None

    def keep(self, tokens: Sequence[int], log_probs: Sequence[TokenLogProbs]) -> list[int]:
        """Appends a round's tokens up to the first stop, where `finish_reason` is set; returns those kept."""
        ends: Callable[[Sequence[int]], bool] | None = None
        rule = self._ends
        if rule is not None:
            so_far = list(self.token_ids)
            ends = lambda kept: rule([*so_far, *kept])  # noqa: E731
        kept, self.finish_reason = keep_until_stop(tokens, eos_token_ids=self._eos, allowance=self.left, ends=ends)
        self.token_ids.extend(kept)
        self._log_probs += log_probs[: len(kept)]
        return kept

    def process(self, tree: TokenTree, logits: Tensor) -> Tensor:
        """Applies the logits processors to [1, N, V]; the very same tensor where there are none."""
        return logits if self._processors is None else self._processors(self.token_ids[:-1], tree, logits)

    def prune(self, tree: TokenTree) -> TokenTree:
        """Drops nodes that the processors forbid."""
        return tree if self._processors is None else self._processors.prune(self.token_ids[:-1], tree)

    def result(self, tokenizer: Any) -> GenerationResult:
        """Returns the finished text, decoded where there is a tokenizer."""
        assert self.finish_reason is not None, "the text goes on"
        text = tokenizer.decode(self.new_ids, skip_special_tokens=True) if tokenizer else None
        return GenerationResult(
            self.new_ids, text, self.finish_reason, self.num_prompt_tokens, self.rounds, self.prefill_seconds, self.seconds,
            None if self.num_likeliest is None else self._log_probs,
        )  # fmt: skip


def prompt_ids(prompt: Prompt, target: Target) -> list[int]:
    """Checks a prompt and turns text into token ids.

    Raises:
        ValueError: text without a tokenizer, no token, an id outside the vocabulary, or no room for an answer.
    """
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError("prompt is text, but the target has no tokenizer; pass token ids")
        prompt = target.tokenizer(prompt).input_ids
    ids = [int(token) for token in prompt]
    vocab_size, limit = target.vocab_size, target.max_positions
    if not ids:
        raise ValueError("prompt must hold at least one token, got none")
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"prompt token {wrong[0]} must be in [0, {vocab_size}), the target's vocabulary")
    if len(ids) >= limit:
        raise ValueError(f"prompt has {len(ids)} tokens, but the target allows {limit} including the answer")
    return ids


def _acceptor(given: Acceptor | None, do_sample: bool | None) -> Acceptor:
    if do_sample is None:
        return given or GreedyAcceptor()
    if given is None:
        return SamplingAcceptor() if do_sample else GreedyAcceptor()
    greedy = isinstance(given, GreedyAcceptor) or getattr(given, "temperature", 1.0) == 0
    if greedy == do_sample:
        raise ValueError(
            f"generation_config.do_sample={do_sample} does not go with the decoder's {type(given).__name__}; give the decoder "
            "no acceptor, or one that samples where the config does"
        )
    if do_sample and getattr(given, "temperature", 1.0) != 1.0:
        raise ValueError(
            f"generation_config has the temperature, so the decoder's {type(given).__name__} must have 1, got "
            f"{getattr(given, 'temperature', None)}"
        )
    return given
