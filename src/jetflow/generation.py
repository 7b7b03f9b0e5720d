"""Generation settings with the meaning that transformers gives them, or an error.

The processors are those that `model.generate` would build from the same `GenerationConfig`, in its order; the tree's nodes
go through them on their own paths. What trees cannot honour is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jetflow.processing import LogitsProcessor

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from jetflow.targets import Target

# Settings that are honoured, through processors, stop rules or lengths.
HONOURED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "pad_token_id",
    "bos_token_id", "eos_token_id",
}  # fmt: skip
# Settings that say nothing about the text of one greedy or sampled sequence.
WITHOUT_EFFECT = {
    "use_cache", "early_stopping", "length_penalty", "output_attentions", "output_hidden_states", "transformers_version",
    "decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "disable_compile", "cache_implementation",
}  # fmt: skip
# Values of other settings that switch them off.
OFF = (None, False, 1, 0, 1.0, 0.0)


@dataclass(frozen=True)
class GenerationOptions:
    """What a `GenerationConfig` means for one prompt.

    Attributes:
        max_new_tokens: most new tokens.
        eos_token_ids: ids that end the text.
        stop_strings: texts that end it.
        do_sample: whether the target draws.
        processors: logits processors, transformers' own, warpers included.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    do_sample: bool
    processors: tuple[LogitsProcessor, ...]


def options_of(config: GenerationConfig, target: Target, num_prompt_tokens: int) -> GenerationOptions:
    """Reads a `GenerationConfig` as `target.model.generate` would, the model's own defaults included.

    Args:
        config: the settings.
        target: the model.
        num_prompt_tokens: length of the prompt, from which some lengths count.

    Raises:
        ValueError: a setting has no meaning on trees; the message names it.
    """
    model: Any = target.model
    # transformers' own reading, which is private but the only one that is its meaning.
    merged, _ = model._prepare_generation_config(config)
    for name, value in merged.to_dict().items():
        known = name in HONOURED or name in WITHOUT_EFFECT or name.startswith("_")
        if not known and value not in OFF:
            raise ValueError(f"generation_config.{name}={value!r} has no meaning for tree decoding; leave it unset")
    if merged.max_new_tokens is not None:
        max_new_tokens = merged.max_new_tokens
    else:
        # Unset, transformers counts its default length from the prompt's end.
        from_prompt = config.max_length is None
        max_new_tokens = merged.max_length if from_prompt else merged.max_length - num_prompt_tokens
    if max_new_tokens < 1:
        raise ValueError(f"generation_config leaves {max_new_tokens} new tokens after a prompt of {num_prompt_tokens}")
    merged.max_length = num_prompt_tokens + max_new_tokens
    if merged.min_new_tokens is not None:
        merged.min_length = num_prompt_tokens + merged.min_new_tokens
    model._prepare_special_tokens(merged, True, device=target.device)
    processors = model._get_logits_processor(merged, input_ids_seq_length=num_prompt_tokens, device=target.device)
    return GenerationOptions(
        max_new_tokens=max_new_tokens,
        eos_token_ids=ids_of(merged.eos_token_id),
        stop_strings=strings_of(merged.stop_strings),
        do_sample=bool(merged.do_sample),
        processors=tuple(processors),
    )


def stop_string_rule(target: Target, strings: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Returns a rule that says whether a text ends with the last of its token ids, by transformers' own criterion.

    Raises:
        ValueError: the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError("stop_strings need a tokenizer, which the target does not have")
    from transformers import StopStringCriteria

    criteria = StopStringCriteria(target.tokenizer, list(strings))

    def ends(token_ids: Sequence[int]) -> bool:
        ids = torch.tensor([list(token_ids)], device=target.device)
        return bool(criteria(ids, None)[0])

    return ends


def ids_of(value: Any) -> tuple[int, ...]:
    """Token ids given as an id, a collection, a tensor or None."""
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return (int(value),) if not isinstance(value, Collection) else tuple(int(one) for one in value)


def strings_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Strings given as one, a sequence or None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
