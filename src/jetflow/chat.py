"""Conversations as text and as token ids, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# `role` (system, user, assistant) and `content`.
Message = dict[str, str]


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    template_args: Mapping[str, Any] | None = None,
    *,
    plain_text: bool = False,
) -> list[int]:
    """Returns the token ids of a conversation that waits for the assistant's next turn.

    Args:
        tokenizer: of the target.
        messages: turns.
        template_args: arguments of the chat template, such as `enable_thinking`.
        plain_text: without a chat template take the turns' contents, a line each, instead of raising.

    Raises:
        ValueError: there is no chat template.
    """
    if plain_text and not has_template(tokenizer):
        return tokenizer("\n".join(one["content"] for one in messages)).input_ids
    text = chat_text(tokenizer, messages, template_args, answer=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_text(tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any] | None, *, answer: bool) -> str:
    """Returns a conversation as the chat template writes it, with the beginning of an answer behind it if `answer`.

    Raises:
        ValueError: there is no chat template.
    """
    check_template(tokenizer)
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=answer, **dict(template_args or {})
    )


def check_template(tokenizer: Any) -> None:
    """Raises ValueError unless there is a chat template."""
    if not has_template(tokenizer):
        raise ValueError("the tokenizer has no chat template, which conversations need; pass plain text, or token ids")


def has_template(tokenizer: Any) -> bool:
    """Whether there is a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None
