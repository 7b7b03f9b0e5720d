"""The corpus of the tiny pair: word problems, small Python functions and short chats, made up from a seed.

Every answer follows from its prompt alone: numbers are computed, names and lists are copied, code is real and its
stated result is what the code returns. `examples/train_tiny.py` trains on it; run this file to read a few documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|mask|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|> {{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant turns are known, got ' + message.role) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

NAMES = [
    "Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Iris", "Jack",
    "Kim", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
]  # fmt: skip
ITEMS = [
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "pens", "shells", "stamps", "stones",
]  # fmt: skip
LISTS = ["numbers", "values", "items", "scores", "prices", "data"]
FACTS = [
    ("France", "Paris", "French", "Europe"), ("Spain", "Madrid", "Spanish", "Europe"),
    ("Italy", "Rome", "Italian", "Europe"), ("Germany", "Berlin", "German", "Europe"),
    ("Greece", "Athens", "Greek", "Europe"), ("Poland", "Warsaw", "Polish", "Europe"),
    ("Japan", "Tokyo", "Japanese", "Asia"), ("China", "Beijing", "Chinese", "Asia"),
    ("Cuba", "Havana", "Spanish", "America"), ("Peru", "Lima", "Spanish", "America"),
    ("Egypt", "Cairo", "Arabic", "Africa"), ("Kenya", "Nairobi", "Swahili", "Africa"),
]  # fmt: skip
# What a list function is called, says, starts from, does with each `x`, and returns; and the same as a Python function.
FUNCTIONS: list[tuple[str, str, str, str, Callable[[list[int], int], object]]] = [
    ("add_all", "the sum of all elements", "result = 0", "result += x", lambda v, k: sum(v)),
    ("largest", "the largest element", "result = {a}[0]", "if x > result:\n            result = x", lambda v, k: max(v)),
    ("smallest", "the smallest element", "result = {a}[0]", "if x < result:\n            result = x", lambda v, k: min(v)),
    ("scale", "every element times {k}", "result = []", "result.append(x * {k})", lambda v, k: [x * k for x in v]),
    ("shift", "every element plus {k}", "result = []", "result.append(x + {k})", lambda v, k: [x + k for x in v]),
    ("backwards", "the elements in reverse order", "result = []", "result.insert(0, x)", lambda v, k: v[::-1]),
    ("count_above", "how many elements are above {k}", "result = 0", "if x > {k}:\n            result += 1",
     lambda v, k: sum(x > k for x in v)),
    ("keep_above", "the elements that are above {k}", "result = []", "if x > {k}:\n            result.append(x)",
     lambda v, k: [x for x in v if x > k]),
    ("keep_even", "the even elements", "result = []", "if x % 2 == 0:\n            result.append(x)",
     lambda v, k: [x for x in v if x % 2 == 0]),
    ("count_odd", "how many elements are odd", "result = 0", "if x % 2 == 1:\n            result += 1",
     lambda v, k: sum(x % 2 for x in v)),
]  # fmt: skip


def math_pair(rng: random.Random) -> tuple[str, str]:
    """A word problem and its solution in steps."""
    a, b = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    # i has two digits, all others have one.
    i, j, k, n = rng.randint(11, 60), rng.randint(2, 9), rng.randint(2, 9), rng.randint(3, 9)
    p = n * k
    kind = rng.randrange(7)
    if kind == 0:
        question = f"{a} has {i} {item}. {b} gives {a} {j} more {item}. Then {a} loses {k} of them."
        return f"{question} How many {item} does {a} have now?", (
            f"First, {a} has {i} {item}.\nThen {b} gives {a} {j} more {item}, so {a} has {i} + {j} = {i + j} {item}.\n"
            f"At last, {a} loses {k} of them, so {a} has {i + j} - {k} = {i + j - k} {item}.\n"
            f"So {a} has {i + j - k} {item} now, and the answer is {i + j - k}."
        )
    if kind == 1:
        j = min(j, p - 1)
        question = f"{a} buys {n} boxes with {k} {item} in each box. Then {a} gives {j} {item} to {b}."
        return f"{question} How many {item} are left?", (
            f"First, {a} buys {n} boxes with {k} {item} in each box, so {a} has {n} * {k} = {p} {item}.\n"
            f"Then {a} gives {j} {item} to {b}, so {a} has {p} - {j} = {p - j} {item}.\n"
            f"So {p - j} {item} are left, and the answer is {p - j}."
        )
    if kind == 2:
        question = f"{a} has {p + j} dollars and buys {n} tickets. Each ticket costs {k} dollars."
        return f"{question} How much money does {a} have now?", (
            f"First, {a} buys {n} tickets and each ticket costs {k} dollars, so {a} pays {n} * {k} = {p} dollars.\n"
            f"Then {a} has {p + j} - {p} = {j} dollars.\nSo {a} has {j} dollars now, and the answer is {j}."
        )
    if kind == 3:
        question = f"{a} has {n} {item} and {b} has {k} times as many."
        return f"{question} How many {item} do they have together?", (
            f"First, {a} has {n} {item}.\nThen {b} has {k} times as many, so {b} has {n} * {k} = {p} {item}.\n"
            f"Together, {a} and {b} have {p} + {n} = {p + n} {item}.\n"
            f"So they have {p + n} {item} together, and the answer is {p + n}."
        )
    if kind == 4:
        question = f"{a} is {i} years old. {b} is {k} years older than {a}."
        return f"{question} How old will {b} be in {n} years?", (
            f"First, {a} is {i} years old.\nThen {b} is {k} years older than {a}, so {b} is {i} + {k} = {i + k} years "
            f"old.\nIn {n} years, {b} will be {i + k} + {n} = {i + k + n} years old.\n"
            f"So {b} will be {i + k + n} years old, and the answer is {i + k + n}."
        )
    if kind == 5:
        question = f"{a} drives {n} hours and makes {k} miles in each hour. Then {a} walks {j} miles."
        return f"{question} How far does {a} go?", (
            f"First, {a} drives {n} hours and makes {k} miles in each hour, so {a} drives {n} * {k} = {p} miles.\n"
            f"Then {a} walks {j} miles, so {a} goes {p} + {j} = {p + j} miles.\n"
            f"So {a} goes {p + j} miles, and the answer is {p + j}."
        )
    question = f"{a} gives {p} {item} to {k} friends, the same number to each. Then each friend finds {j} more {item}."
    return f"{question} How many {item} does each friend have now?", (
        f"First, {a} gives the same number to each of {k} friends, so each friend has {p} / {k} = {n} {item}.\n"
        f"Then each friend finds {j} more {item}, so each friend has {n} + {j} = {n + j} {item}.\n"
        f"So each friend has {n + j} {item} now, and the answer is {n + j}."
    )


def code_pair(rng: random.Random) -> tuple[str, str]:
    """A request for a Python function and the function, with what it returns for the list that was given."""
    name, says, start, body, function = rng.choice(FUNCTIONS)
    arg, k = rng.choice(LISTS), rng.randint(2, 9)
    values = rng.sample(range(1, 10), 3)
    says, start, body = says.format(k=k), start.format(a=arg), body.format(k=k)
    return (
        f"Write a Python function {name}({arg}) that returns {says}. What does it return for {values}?",
        f"Here is a Python function that returns {says}:\n\n```python\ndef {name}({arg}):\n    {start}\n"
        f"    for x in {arg}:\n        {body}\n    return result\n```\n\n"
        f"The call {name}({values}) returns {function(values, k)}.",
    )


def chat_pair(rng: random.Random) -> tuple[str, str]:
    """A short request and a polite answer."""
    a, b = rng.sample(NAMES, 2)
    things = rng.sample(ITEMS, 3)
    kind = rng.randrange(5)
    if kind == 0:
        land, capital, language, continent = rng.choice(FACTS)
        return (
            f"My name is {a}, and I want to visit {land} with {b}. What should we know?",
            f"Hello {a}, what a nice plan! {land} is a country in {continent}. The capital of {land} is {capital}, and most "
            f"people there speak {language}. You and {b} should start your trip in {capital}. Have a good time, {a}!",
        )
    if kind == 1:
        return (
            f"Please write a short note to {b} from {a} that says thank you for the {things[0]}.",
            f"Of course! Here is a short note:\n\nDear {b},\n\nThank you very much for the {things[0]}. I was so happy when "
            f"I saw the {things[0]} this morning. I hope that we can meet again soon.\n\nBest wishes,\n{a}",
        )
    if kind == 2:
        return (
            f"I am {a}. Make a shopping list with {things[0]}, {things[1]} and {things[2]}, please.",
            f"Of course, {a}! Here is your shopping list:\n\n1. {things[0]}\n2. {things[1]}\n3. {things[2]}\n\nThere are three "
            f"things on your list, and the first one is {things[0]}. Have a nice day, {a}!",
        )
    if kind == 3:
        words = rng.sample(NAMES, rng.randint(3, 4))
        return (
            f"Sort these names: {', '.join(words)}.",
            f"Here are the names in the order of the alphabet:\n\n{', '.join(sorted(words))}.\n\nThe first name is "
            f"{min(words)} and the last name is {max(words)}.",
        )
    day = rng.choice(["Monday", "Tuesday", "Friday", "Sunday"])
    return (
        f"{a} and {b} meet on {day} to sell {things[0]}. Tell me a short story about them.",
        f"It was a sunny {day} when {a} and {b} met to sell {things[0]}. At first nobody came, and {a} was a little sad. "
        f"But then {b} had a good idea and gave away some {things[0]} for free. In the end, {a} and {b} sold all the "
        f"{things[0]} and went home happy.",
    )


KINDS = {"math": (math_pair, 0.45), "code": (code_pair, 0.3), "chat": (chat_pair, 0.25)}


def documents(num_documents: int, seed: int) -> list[dict[str, str]]:
    """Returns that many documents with different prompts, each `{"kind", "prompt", "answer"}`."""
    rng = random.Random(seed)
    makers, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    found: dict[str, dict[str, str]] = {}
    while len(found) < num_documents:
        kind = rng.choices(makers, weights)[0]
        prompt, answer = KINDS[kind][0](rng)
        found.setdefault(prompt, {"kind": kind, "prompt": prompt, "answer": answer})
    return list(found.values())


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE, so that any text round-trips; digits stand alone, and the mask token is in no text."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    pad, end, mask, *turns = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=pad, eos_token=end, mask_token=mask, extra_special_tokens=turns,
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=1024,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    for document in documents(12, seed=0):
        print(f"[{document['kind']}] {document['prompt']}\n{document['answer']}\n")
