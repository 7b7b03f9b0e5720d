"""Training data: prompts and conversations in, token sequences with the spans that the head learns to predict out.

A line of a data file is one JSON object. It holds either an `Answer` (`token_ids` and `loss_spans`, as `jetflow regenerate`
writes them), or a conversation under one of the names that public sets use: `messages` (role, content), `conversations`
(ShareGPT: from, value), `turns` (a list of user texts), or a text `prompt`, `question` or `instruction`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetflow.chat import Message, chat_text
from jetflow.jsonl import read_jsonl

Span = tuple[int, int]

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PROMPT_COLUMNS = ("prompt", "question", "instruction")


class Conversation(NamedTuple):
    """Chat turns under a name.

    Attributes:
        id: the row's own `id`, or file name and line.
        messages: turns with `role` (system, user, assistant) and `content`.
        where: file and line, for error messages.
    """

    id: str
    messages: list[Message]
    where: str


class Example(NamedTuple):
    """One sequence to train on.

    Attributes:
        id: name of the conversation.
        token_ids: the whole sequence.
        loss_spans: half-open ranges of the tokens that the head learns to predict, in order.
    """

    id: str
    token_ids: list[int]
    loss_spans: list[Span]


def read_rows(source: str, *, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields place and content of each row of a JSONL file or of a data set on the hub.

    Args:
        source: path of a file, or a hub name like `owner/name`.
        split: which part of a hub data set.

    Raises:
        ValueError: a line is no JSON object; the message names file and line.
        FileNotFoundError: `source` is neither.
    """
    path = Path(source)
    if path.is_file():
        yield from read_jsonl(source)
        return
    if path.suffix or source.count("/") != 1:
        raise FileNotFoundError(f"{source} is neither a file nor a hub name like owner/name")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{source} is read from the hub, which needs: pip install 'jetflow[train]'") from error
    for number, row in enumerate(load_dataset(source, split=split)):
        yield f"{source}, row {number}", dict(row)


def read_conversations(source: str, *, split: str = "train") -> Iterator[Conversation]:
    """Yields the conversations of a JSONL file or of a data set on the hub.

    Raises:
        ValueError: a row holds none of the known columns, an unknown role, or no user turn; the message names the row.
        FileNotFoundError: `source` is neither a file nor a hub name.

    Example:
        >>> [one.messages for one in read_conversations("prompts.jsonl")]  # doctest: +SKIP
        [[{'role': 'user', 'content': 'What is a polygon?'}]]
    """
    for where, row in read_rows(source, split=split):
        messages = _messages(row, where)
        if not any(message["role"] == "user" for message in messages):
            raise ValueError(f"{where}: needs at least one user turn")
        yield Conversation(_name(row, where), messages, where)


def read_examples(source: str, tokenizer: Any = None, *, template_args: Mapping[str, Any] | None = None) -> Iterator[Example]:
    """Yields sequences to train on: regenerated answers as they are, conversations through the chat template.

    Args:
        source: JSONL file or hub name.
        tokenizer: needed for conversations only.
        template_args: arguments of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: a row is malformed or has no assistant turn; the message names it.
    """
    for where, row in read_rows(source):
        if "token_ids" in row:
            yield _checked_example(row, where)
            continue
        messages = _messages(row, where)
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f"{where}: holds prompts without answers, which teach nothing; write the target's own with `jetflow regenerate`"
            )
        try:
            token_ids, spans = render(tokenizer, messages, template_args)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        yield Example(_name(row, where), token_ids, spans)


def render(
    tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any] | None = None
) -> tuple[list[int], list[Span]]:
    """Tokenises a conversation and finds the tokens of its assistant turns.

    A span runs from the first token after the template's own header (an empty thinking block included) through the token
    that ends the turn. It is found by rendering the turns before with the generation prompt, so that templates without
    `{% generation %}` marks work, and by comparing with the content, so that a template that rewrites it is caught.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns.
        template_args: arguments of the chat template, such as `enable_thinking`.

    Returns:
        Token ids, and one half-open span for each assistant turn.

    Raises:
        ValueError: there is no chat template, or it does not write an assistant turn as it is given.
    """
    text = chat_text(tokenizer, messages, template_args, answer=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = chat_text(tokenizer, messages[:index], template_args, answer=True)
        begin = _common_prefix(asked, text)
        content = message["content"].strip()
        found = text.find(content, begin)
        if found < 0 or text[begin:found].strip():
            raise ValueError(f"the chat template does not write assistant turn {index} as it is given")
        end = found + len(content)
        first = next((i for i, start in enumerate(starts) if start >= begin), len(starts))
        last = next((i for i, start in enumerate(starts) if start >= end), len(starts))
        if last < len(token_ids) and token_ids[last] in set(tokenizer.all_special_ids):
            last += 1
        spans.append((first, last))
    return token_ids, spans


def user_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Returns a conversation without its answers: one group per user turn, with the system turns before it."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        if message["role"] == "user":
            groups.append([])
    # What stands behind the last user turn asks for nothing.
    return groups[:-1]


def _common_prefix(one: str, other: str) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _name(row: Mapping[str, Any], where: str) -> str:
    """The row's own id, or its file's name and line, wherever the file lies."""
    return str(row.get("id", where.rsplit("/", 1)[-1]))


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    if isinstance(row.get("messages"), list):
        turns = [(turn.get("role"), turn.get("content")) for turn in row["messages"]]
    elif isinstance(row.get("conversations"), list):
        turns = [(SHAREGPT_ROLES.get(turn.get("from"), turn.get("from")), turn.get("value")) for turn in row["conversations"]]
    elif isinstance(row.get("turns"), list):
        turns = [("user", text) for text in row["turns"]]
    else:
        column = next((name for name in PROMPT_COLUMNS if isinstance(row.get(name), str)), None)
        if column is None:
            raise ValueError(
                f"{where}: needs messages, conversations, turns or a text prompt; has {', '.join(row) or 'nothing'}"
            )
        turns = [("user", row[column])]
    for number, (role, content) in enumerate(turns):
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: turn {number} has the role {role!r}; system, user and assistant are known")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{where}: turn {number} must hold text, got {content!r}")
    return [{"role": str(role), "content": str(content)} for role, content in turns]


def _checked_example(row: Mapping[str, Any], where: str) -> Example:
    token_ids, spans = row["token_ids"], row.get("loss_spans")
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise ValueError(f"{where}: token_ids must be a list of integers")
    if not isinstance(spans, list):
        raise ValueError(f"{where}: needs loss_spans, a list of [begin, end] pairs")
    last = 0
    for begin, end in spans:
        if not last <= begin < end <= len(token_ids):
            raise ValueError(
                f"{where}: loss span [{begin}, {end}] must be in order, not empty and inside {len(token_ids)} tokens"
            )
        last = end
    return Example(_name(row, where), token_ids, [(begin, end) for begin, end in spans])
