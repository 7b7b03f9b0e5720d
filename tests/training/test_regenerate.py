"""Regeneration: the target's own text, each answer once whatever happens on the way."""

import json
from pathlib import Path

import pytest
import torch

from jetflow.acceptors import GreedyAcceptor, SamplingAcceptor
from jetflow.chat import chat_ids
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.targets import Target
from jetflow.training.answering import TargetAnswerer, answer_prompts
from jetflow.training.data import Conversation, read_examples
from jetflow.training.regenerate import Job, RegenerationSettings, regenerate, target_fingerprint

PAIR = Path(__file__).parents[2] / "models" / "tiny"
NEW = 24


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained(str(PAIR / "target"), dtype=torch.float32)


def conversations(count=7, turns=1):
    lines = [json.loads(line) for line in (PAIR / "heldout.jsonl").read_text().splitlines()[: count * turns]]
    texts = [line["prompt"] for line in lines]
    return [
        Conversation(f"c{i}", [{"role": "user", "content": text} for text in texts[i * turns : (i + 1) * turns]], f"line {i}")
        for i in range(count)
    ]


def run(target, out, *, settings=None, count=7, on_answer=None, batch_size=3, turns=1, **changes):
    settings = settings or RegenerationSettings(max_new_tokens=NEW)
    answerer = TargetAnswerer(target, settings, batch_size=batch_size, **changes)
    return regenerate(
        conversations(count, turns),
        answerer,
        out,
        settings=settings,
        fingerprint=target_fingerprint(target),
        on_answer=on_answer,
    )


def read(out):
    return {(row["id"], row["sample"]): row for row in map(json.loads, out.read_text().splitlines())}


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_answers_are_the_targets_own_text(target, tmp_path, batch_size):
    report = run(target, tmp_path / "a.jsonl", batch_size=batch_size)
    assert report == (7, 0, 0)
    rows = read(tmp_path / "a.jsonl")
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=1)
    for one in conversations():
        asked = chat_ids(target.tokenizer, one.messages)
        expected = decoder.generate(asked, max_new_tokens=NEW)
        row = rows[one.id, 0]
        assert row["token_ids"] == asked + expected.token_ids
        assert row["loss_spans"] == [[len(asked), len(asked) + len(expected.token_ids)]]
        assert row["finish_reasons"] == [str(expected.finish_reason)]
        assert row["target"] == target_fingerprint(target)
    (first, *_) = read_examples(str(tmp_path / "a.jsonl"))
    assert first.loss_spans


def test_killed_run_goes_on_without_repeats_or_gaps(target, tmp_path):
    class KilledError(Exception):
        pass

    def kill_after(limit):
        count = 0

        def on_answer(done, total):
            nonlocal count
            count += 1
            if count == limit:
                raise KilledError

        return on_answer

    run(target, tmp_path / "whole.jsonl")
    out = tmp_path / "parts.jsonl"
    for limit in (2, 1, 3):
        with pytest.raises(KilledError):
            run(target, out, on_answer=kill_after(limit))
        # The kill came while a line was being written.
        with out.open("a") as file:
            file.write('{"id": "c6", "samp')
    report = run(target, out)
    assert report == (1, 6, 0)
    assert len(out.read_text().splitlines()) == 7
    assert read(out) == read(tmp_path / "whole.jsonl")
    assert run(target, out) == (0, 7, 0)


def test_samples_differ_and_repeat_with_the_seed(target, tmp_path):
    settings = RegenerationSettings(max_new_tokens=NEW, temperature=1.5, num_samples=3, seed=4)
    for name in ("a", "b"):
        run(target, tmp_path / name, settings=settings, count=2)
    rows = read(tmp_path / "a")
    assert rows == read(tmp_path / "b")
    assert len(rows) == 6
    assert len({tuple(rows["c0", sample]["token_ids"]) for sample in range(3)}) == 3


def test_later_turns_follow_on_the_answers_before(target, tmp_path):
    run(target, tmp_path / "a.jsonl", count=3, turns=2)
    for row in read(tmp_path / "a.jsonl").values():
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
        spans = row["loss_spans"]
        texts = [target.tokenizer.decode(row["token_ids"][a:b], skip_special_tokens=True) for a, b in spans]
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert texts == answers[-len(texts) :]
        assert len(spans) == 2


def test_a_conversation_that_outgrows_the_target_ends_with_its_last_answer(target, tmp_path):
    settings = RegenerationSettings(max_new_tokens=NEW)
    three = [message for one in conversations(3) for message in one.messages]
    limit = len(chat_ids(target.tokenizer, three[:1]))
    answerer = TargetAnswerer(target, settings, max_prompt_tokens=limit)
    job = [Conversation("long", [*three, {"role": "system", "content": "asks for nothing"}], "")]
    assert regenerate(job, answerer, tmp_path / "a.jsonl", settings=settings, fingerprint="x") == (1, 0, 0)
    row = read(tmp_path / "a.jsonl")["long", 0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert len(row["loss_spans"]) == len(row["finish_reasons"]) == 1


def test_long_prompts_are_left_out_and_counted(target, tmp_path):
    lengths = sorted(len(chat_ids(target.tokenizer, one.messages)) for one in conversations())
    report = run(target, tmp_path / "a.jsonl", max_prompt_tokens=lengths[3])
    assert report == (4, 0, 3)


def test_a_run_that_is_stopped_early_is_a_fair_sample():
    """Sorted by length within pools only: the first answers are not all short."""
    order = []

    class Recorder(TargetAnswerer):
        def __init__(self):
            self._limit, self._batch_size = 10_000, 2

        def _ask(self, messages):
            return [0] * len(messages[-1]["content"])

        def _batch(self, jobs):
            order.append([len(job.conversation.messages[-1]["content"]) for job in jobs])
            return iter(())

    many = [Conversation(f"c{i}", [{"role": "user", "content": "x" * (1 + i)}], f"line {i}") for i in range(320)]
    list(Recorder()([Job(one, 0) for one in many]))
    assert sorted(length for batch in order for length in batch) == list(range(1, 321))
    pool = [length for batch in order[:16] for length in batch]
    assert pool == sorted(pool)
    assert 100 < sum(pool) / len(pool) < 220


def test_other_settings_or_another_target_are_refused(target, tmp_path):
    out = tmp_path / "a.jsonl"
    run(target, out, count=2)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 was written with settings .*continue with the same"):
        run(target, out, count=2, settings=RegenerationSettings(max_new_tokens=5))
    settings = RegenerationSettings(max_new_tokens=NEW)
    with pytest.raises(ValueError, match="written with target"):
        regenerate(conversations(2), TargetAnswerer(target, settings), out, settings=settings, fingerprint="another")


def test_bad_input_is_named(target, tmp_path):
    with pytest.raises(ValueError, match="must hold at least one prompt"):
        run(target, tmp_path / "a", count=0)
    settings = RegenerationSettings(max_new_tokens=2)
    with pytest.raises(ValueError, match="'c0' stands twice"):
        regenerate(conversations(1) * 2, TargetAnswerer(target, settings), tmp_path / "b", settings=settings, fingerprint="x")
    with pytest.raises(ValueError, match="num_samples=2 greedy answers would be equal"):
        RegenerationSettings(num_samples=2)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        RegenerationSettings(max_new_tokens=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TargetAnswerer(target, settings, batch_size=0)


def test_sampling_beside_others_follows_the_law(target):
    # Rows of one batch draw one after the other from one generator, and none twice from the same draw.
    prompts = [chat_ids(target.tokenizer, conversations(1)[0].messages)] * 4
    generator = torch.Generator().manual_seed(0)
    answers = answer_prompts(target, prompts, SamplingAcceptor(2.0), 12, generator=generator)
    assert len({tuple(one) for one in answers}) == 4
    assert answer_prompts(target, [], GreedyAcceptor(), 5) == []


def test_fingerprint_names_weights_whatever_their_dtype(target):
    half = Target.from_pretrained(str(PAIR / "target"), dtype=torch.bfloat16)
    assert target_fingerprint(half) == target_fingerprint(target)
    with torch.no_grad():
        half.model.get_input_embeddings().weight[0, 0] += 1
    assert target_fingerprint(half) != target_fingerprint(target)
