"""Data: every input format, errors that name the line, and loss spans that are exactly the assistant's tokens."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jetflow.chat import chat_ids
from jetflow.training.data import read_conversations, read_examples, render

PAIR = Path(__file__).parents[2] / "models" / "tiny" / "target"
TURNS = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Three apples."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "a"},
]
# As Qwen3's: the last answer gets an empty thinking block, earlier ones do not; the generation prompt has one when off.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UPPER = TAGGED.replace(
    "{{ m.content }}{{ eos_token }}{% endgeneration %}", "{{ m.content | upper }}{{ eos_token }}{% endgeneration %}"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(PAIR)


def spans_as_text(tokenizer, messages, **template_args):
    ids, spans = render(tokenizer, messages, template_args)
    return [tokenizer.decode(ids[begin:end]) for begin, end in spans]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"turns": ["Hi"]},
        {"prompt": "Hi"},
        {"question": "Hi", "answer": "unused column"},
        {"instruction": "Hi"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_every_format_is_one_conversation(tmp_path, row):
    (one,) = read_conversations(write(tmp_path / "d.jsonl", row))
    assert one.messages == [{"role": "user", "content": "Hi"}]
    assert one.id == "d.jsonl, line 1"


def test_ids_and_separators_inside_strings_survive(tmp_path):
    row = json.dumps({"id": 7, "prompt": "a\u2028b"}, ensure_ascii=False)
    (one,) = read_conversations(write(tmp_path / "d.jsonl", row))
    assert (one.id, one.messages[0]["content"]) == ("7", "a\u2028b")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"d.jsonl, line 2: is not JSON"),
        ("[1]", "line 2: must be a JSON object, got list"),
        ({"text": "x"}, "line 2: needs messages, conversations, turns or a text prompt; has text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "line 2: turn 0 has the role 'tool'"),
        ({"messages": [{"role": "user", "content": "  "}]}, "line 2: turn 0 must hold text, got '  '"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: needs at least one user turn"),
    ],
)
def test_errors_name_the_line(tmp_path, row, message):
    path = write(tmp_path / "d.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match=message):
        list(read_conversations(path))


def test_a_name_that_is_neither_file_nor_data_set(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a file nor a hub name"):
        list(read_conversations(str(tmp_path / "nothing.jsonl")))


def test_spans_are_the_answers_and_the_token_that_ends_them(tokenizer):
    end = tokenizer.eos_token
    assert spans_as_text(tokenizer, TURNS) == [f"Three apples.{end}", f"a{end}"]
    ids, spans = render(tokenizer, TURNS)
    assert ids == tokenizer.apply_chat_template(TURNS, return_dict=False)
    assert chat_ids(tokenizer, TURNS[:1]) == ids[: spans[0][0]]


def test_spans_equal_the_templates_own_marks(tokenizer):
    tokenizer.chat_template = TAGGED
    ids, spans = render(tokenizer, TURNS)
    marked = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert marked["input_ids"] == ids
    inside = [any(begin <= i < end for begin, end in spans) for i in range(len(ids))]
    assert marked["assistant_masks"] == [int(one) for one in inside]
    assert 0 < sum(inside) < len(inside)


def test_empty_thinking_block_is_no_part_of_the_answer(tokenizer):
    tokenizer.chat_template = THINKING
    end = tokenizer.eos_token
    assert spans_as_text(tokenizer, TURNS, enable_thinking=False) == [f"Three apples.{end}", f"a{end}"]


def test_answers_with_characters_of_several_bytes(tokenizer):
    turns = [{"role": "user", "content": "café?"}, {"role": "assistant", "content": "naïve ☕ 漢"}]
    assert spans_as_text(tokenizer, turns) == [f"naïve ☕ 漢{tokenizer.eos_token}"]


def test_template_that_rewrites_the_answer_is_caught(tokenizer):
    tokenizer.chat_template = UPPER
    with pytest.raises(ValueError, match="does not write assistant turn 1 as it is given"):
        render(tokenizer, TURNS)


def test_no_chat_template_is_a_clear_error(tokenizer, tmp_path):
    tokenizer.chat_template = None
    path = write(tmp_path / "d.jsonl", {"messages": TURNS})
    with pytest.raises(ValueError, match="line 1: the tokenizer has no chat template"):
        list(read_examples(path, tokenizer))


def test_examples_come_from_answers_as_they_are_and_from_conversations(tokenizer, tmp_path):
    path = write(
        tmp_path / "d.jsonl", {"id": "a", "token_ids": [1, 2, 3], "loss_spans": [[1, 3]], "extra": 0}, {"messages": TURNS}
    )
    first, second = read_examples(path, tokenizer)
    assert first == ("a", [1, 2, 3], [(1, 3)])
    assert (second.token_ids, second.loss_spans) == render(tokenizer, TURNS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 1: holds prompts without answers.*jetflow regenerate"),
        ({"token_ids": [1, "2"], "loss_spans": []}, "token_ids must be a list of integers"),
        ({"token_ids": [1, 2]}, "needs loss_spans"),
        ({"token_ids": [1, 2], "loss_spans": [[1, 3]]}, r"loss span \[1, 3\] must be in order, not empty and inside 2 tokens"),
        ({"token_ids": [1, 2], "loss_spans": [[1, 1]]}, r"loss span \[1, 1\]"),
    ],
)
def test_rows_that_teach_nothing_or_are_malformed(tokenizer, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        list(read_examples(write(tmp_path / "d.jsonl", row), tokenizer))
