"""Conversations as token ids, from wherever they are asked for."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jetflow.chat import chat_ids, chat_text

TINY = Path(__file__).parents[1] / "models" / "tiny" / "target"
TURNS = [
    {"role": "user", "content": "Tom has 3 apples."},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "Go on."},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_ids_are_those_of_the_template_with_the_beginning_of_an_answer(tokenizer):
    for plain_text in (False, True):
        expected = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
        assert chat_ids(tokenizer, TURNS, plain_text=plain_text) == expected


def test_template_arguments_reach_the_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    assert chat_text(tokenizer, TURNS[:1], {"enable_thinking": 7}, answer=True) == "Tom has 3 apples.7"


def test_without_a_template_there_is_plain_text_or_an_error(tokenizer):
    tokenizer.chat_template = None
    assert chat_ids(tokenizer, TURNS[:2], plain_text=True) == tokenizer("Tom has 3 apples.\nFine.").input_ids
    for one in (tokenizer, None):
        with pytest.raises(ValueError, match="the tokenizer has no chat template, which conversations need"):
            chat_ids(one, TURNS)
