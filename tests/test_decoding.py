import random

import pytest
import torch
from conftest import VOCAB_SIZE, make_model, plain_greedy

from jetflow import GreedyAcceptor, PromptLookupDrafter, SamplingAcceptor, SpeculativeDecoder, Target, TokenTree
from jetflow.protocols import DraftContext

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
NUM_NEW = 40


class ScriptedDrafter:
    """Knows the target's text and drafts it well or badly, so that every way through a round is taken."""

    def __init__(self, kind: str, text: list[int], prompt_length: int):
        self.kind = kind
        self.text = text
        self.prompt_length = prompt_length
        self.random = random.Random(0)

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        done = int(context.prefix_lens[0]) + 1 - self.prompt_length
        coming = self.text[done:] + [3] * budget
        tokens, parents = [int(context.root_tokens[0])], [-1]
        if self.kind == "random":
            used = set()
            while len(tokens) < budget:
                pair = (self.random.randrange(len(tokens)), self.random.randrange(VOCAB_SIZE))
                if pair not in used:
                    used.add(pair)
                    parents.append(pair[0])
                    tokens.append(pair[1])
        spine = 0
        for token in coming:
            if self.kind == "random" or len(tokens) == budget:
                break
            wrong = (token + 1) % VOCAB_SIZE
            if self.kind in ("wrong", "second_child"):
                tokens.append(wrong)
                parents.append(spine)
            if self.kind == "wrong":
                spine = len(tokens) - 1
            elif len(tokens) < budget:
                tokens.append(token)
                parents.append(spine)
                spine = len(tokens) - 1
        return TokenTree.from_parents([tokens], [parents])


@pytest.mark.parametrize("budget", [1, 7, 31, 64])
@pytest.mark.parametrize("kind", ["perfect", "random", "wrong", "second_child"])
def test_greedy_output_is_plain_decoding(model, kind, budget):
    expected = plain_greedy(model, PROMPT, NUM_NEW)
    decoder = SpeculativeDecoder(Target(model), ScriptedDrafter(kind, expected, len(PROMPT)), budget=budget)
    result = decoder.generate(PROMPT, max_new_tokens=NUM_NEW)
    assert result.token_ids == expected
    assert sum(stats.num_kept for stats in result.rounds) == len(expected) - 1
    if kind == "perfect":
        # Every round but the last commits a whole chain and the bonus.
        assert all(stats.num_kept == budget for stats in result.rounds[:-1])
    if kind == "wrong" or budget == 1:
        assert all(stats.num_kept == 1 for stats in result.rounds)
    if kind == "second_child":
        assert all(stats.num_accepted == (budget - 1) // 2 for stats in result.rounds[:-1])


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("prefill_chunk", [1, 3, 2048])
def test_prompt_lengths_and_chunks_do_not_change_the_text(model, length, prefill_chunk):
    prompt = PROMPT[:length]
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=8, prefill_chunk=prefill_chunk)
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == plain_greedy(model, prompt, 20)


def test_one_object_serves_many_calls():
    model = make_model("qwen3")
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=8)
    prompts = [PROMPT, PROMPT[3:], PROMPT]
    results = decoder.generate(prompts, max_new_tokens=25)
    assert [r.token_ids for r in results] == [plain_greedy(model, p, 25) for p in prompts]
    assert [s.num_kept for s in results[0].rounds] == [s.num_kept for s in results[2].rounds]


def test_a_failing_callback_leaves_the_decoder_usable():
    model = make_model("llama")
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=8)

    def fail(event):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        decoder.generate(PROMPT, max_new_tokens=20, on_round=fail)
    assert decoder.generate(PROMPT, max_new_tokens=20).token_ids == plain_greedy(model, PROMPT, 20)


def test_stop_token_inside_an_accepted_run_ends_the_text():
    model = make_model("qwen3")
    expected = plain_greedy(model, PROMPT, NUM_NEW)
    stop = expected[10]
    first = expected.index(stop)
    decoder = SpeculativeDecoder(Target(model), ScriptedDrafter("perfect", expected, len(PROMPT)), budget=31)
    result = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, eos_token_id=[stop])
    assert result.token_ids == expected[: first + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("num_new", [1, 2, 3, 9])
def test_length_limit_is_exact(num_new):
    model = make_model("qwen3")
    expected = plain_greedy(model, PROMPT, NUM_NEW)
    decoder = SpeculativeDecoder(Target(model), ScriptedDrafter("perfect", expected, len(PROMPT)), budget=31)
    result = decoder.generate(PROMPT, max_new_tokens=num_new)
    assert result.token_ids == expected[:num_new]
    assert result.finish_reason == "length"


def test_text_stops_at_the_last_position_of_the_target():
    model = make_model("llama")
    limit = model.config.max_position_embeddings
    prompt = [7 + i % 40 for i in range(limit - 3)]
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=16)
    result = decoder.generate(prompt, max_new_tokens=50)
    assert result.token_ids == plain_greedy(model, prompt, 3)


def test_streamer_gets_every_token_once_and_in_order():
    class Streamer:
        def __init__(self):
            self.puts, self.ends = [], 0

        def put(self, value):
            self.puts.append(value.tolist())

        def end(self):
            self.ends += 1

    model = make_model("qwen3")
    streamer, events = Streamer(), []
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=8)
    result = decoder.generate(PROMPT, max_new_tokens=30, streamer=streamer, on_round=events.append)
    assert streamer.puts[0] == PROMPT
    assert [t for put in streamer.puts[1:] for t in put] == result.token_ids
    assert streamer.ends == 1
    assert [t for event in events for t in event.kept] == result.token_ids[1:]


def test_sampling_is_repeatable_and_leaves_the_global_state_alone():
    target = Target(make_model("qwen3"))
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), SamplingAcceptor(2.0), budget=8)
    before = torch.get_rng_state()
    texts = [decoder.generate(PROMPT, max_new_tokens=20, seed=seed).token_ids for seed in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) > 2
    assert torch.equal(before, torch.get_rng_state())
    both = decoder.generate([PROMPT[2:], PROMPT], max_new_tokens=20, seed=1)
    assert both[1].token_ids == texts[0]


def test_near_zero_temperature_is_greedy():
    model = make_model("qwen3")
    for temperature in (0.0, 1e-6):
        decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), SamplingAcceptor(temperature), budget=8)
        assert decoder.generate(PROMPT, max_new_tokens=20).token_ids == plain_greedy(model, PROMPT, 20)


def test_users_model_is_left_as_it_was():
    model = make_model("qwen3").train()
    model.requires_grad_(True)
    before = model.config.to_dict(), model.config._attn_implementation
    target = Target(model, attention="eager")
    SpeculativeDecoder(target, PromptLookupDrafter(), budget=8).generate(PROMPT, max_new_tokens=10)
    target.features(torch.tensor([PROMPT]), [0, 1])
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(layer._forward_hooks for layer in model.model.layers)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "at least one token"),
        ("", {}, "no tokenizer"),
        ([[]], {}, "at least one token"),
        ([VOCAB_SIZE], {}, "must be in"),
        ([3] * 256, {}, "allows 256"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_prompts_are_refused(prompt, settings, message):
    decoder = SpeculativeDecoder(Target(make_model("qwen3")), PromptLookupDrafter())
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompt, **settings)


def test_bad_budgets_and_trees_are_refused():
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match="budget must be at least 1"):
        SpeculativeDecoder(target, PromptLookupDrafter(), budget=0)

    class Wide:
        def propose(self, context, budget):
            return TokenTree.from_parents([[int(context.root_tokens[0]), 4, 5]], [[-1, 0, 0]])

    class WrongRoot:
        def propose(self, context, budget):
            return TokenTree.root_only(context.root_tokens + 1)

    with pytest.raises(ValueError, match="at most 2 nodes"):
        SpeculativeDecoder(target, Wide(), budget=2).generate(PROMPT)
    with pytest.raises(ValueError, match="must be the root token"):
        SpeculativeDecoder(target, WrongRoot(), budget=2).generate(PROMPT)


def test_nan_weights_are_an_error_that_says_so():
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for acceptor in (GreedyAcceptor(), SamplingAcceptor(1.0)):
        with pytest.raises(ValueError, match="NaN"):
            SpeculativeDecoder(Target(model), PromptLookupDrafter(), acceptor).generate(PROMPT)
