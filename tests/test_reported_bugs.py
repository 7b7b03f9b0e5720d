"""Bugs that people of this field reported: stopping, sampling, processors, measures. One test per kind, or where it is.

Stopping: inside an accepted run, stop before length, exact limits, no end token: test_stopping.py and test_decoding.py; ids in
any form and minimum lengths: test_generation.py. Sampling: acceptors/test_rules.py and test_match.py, where siblings drawn
without replacement, wrong proposals, strict comparison and unusable logits stand. Processors, log-probabilities and equal
settings: test_generation.py. Measures and the user's objects: test_decoding.py and benchmark/.

Not applicable: settings of each request of a batch, seeds by row and rows of a batch that end early (`generate` takes several
prompts one after another; every prompt starts from the seed); sliding windows in draft layers (refused by the loader);
recompiling by tree size (nothing is compiled).
"""

import copy
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, make_model
from test_generation import PROMPT, TreeDrafter
from transformers import GenerationConfig, TextStreamer

from jetflow import (
    GreedyAcceptor,
    RecursiveRejection,
    SamplingAcceptor,
    SpeculativeDecoder,
    Target,
    TokenTree,
    TraversalVerification,
)
from jetflow.acceptors import rejection, target_law
from jetflow.trees.token_tree import DraftLaws

TINY = Path(__file__).parents[1] / "models" / "tiny" / "target"


@pytest.fixture(scope="module")
def tiny():
    return Target.from_pretrained(TINY)


def script(ids, prompt_length):
    """A processor that makes any text the target's own: the token at each place is forced."""

    def force(token_ids, scores):
        place = token_ids.shape[1] - prompt_length
        forced = torch.full_like(scores, -torch.inf)
        forced[:, ids[min(place, len(ids) - 1)]] = 0.0
        return forced

    return force


def decode_script(tiny, text, *, width, **settings):
    """Decodes a scripted text with drafts of `width` tokens; returns its ids and the result."""
    ids = tiny.tokenizer(text, add_special_tokens=False).input_ids
    prompt = tiny.tokenizer("Ann").input_ids
    drafter = TreeDrafter(ids, len(prompt), perfect=True)
    decoder = SpeculativeDecoder(tiny, drafter, budget=width)
    processors = [script(ids, len(prompt))]
    return ids, decoder.generate(prompt, max_new_tokens=len(ids), logits_processors=processors, **settings)


@pytest.mark.parametrize("width", [1, 2, 3, 16])
def test_stop_strings_end_the_text_where_one_token_at_a_time_would(tiny, width):
    """Inside one accepted block, over the border of two rounds, and over several tokens."""
    text = "Ann has 12 apples and 30 pears. Then Tom takes 7 of them."
    for stop in ("apples", "es an", "0 pea", "pears.", "T"):
        ids, result = decode_script(tiny, text, width=width, stop_strings=stop, log_probs=0)
        first = next(i for i in range(len(ids)) if stop in tiny.tokenizer.decode(ids[: i + 1]))
        assert result.token_ids == ids[: first + 1], stop
        assert len(result.log_probs) == len(result.token_ids)
        assert result.text == tiny.tokenizer.decode(ids[: first + 1])
        assert result.finish_reason == "stop"


def test_stop_strings_without_a_tokenizer_are_refused():
    decoder = SpeculativeDecoder(Target(make_model("qwen3")), TreeDrafter([], 0, perfect=True))
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        decoder.generate(PROMPT, stop_strings=["a"])


class Chunks(TextStreamer):
    """Collects what is printed."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.chunks, self.ends = [], 0

    def on_finalized_text(self, text, stream_end=False):
        self.chunks.append(text)
        self.ends += stream_end


@pytest.mark.parametrize("width", [1, 2, 5])
def test_streams_never_break_a_character(tiny, width):
    text = "Ann \U0001f34e eats \u6c34\u679c \u00e9t\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 end"
    stream = Chunks(tiny.tokenizer)
    ids, result = decode_script(tiny, text, width=width, streamer=stream)
    assert result.token_ids == ids
    assert "".join(stream.chunks) == tiny.tokenizer.decode(ids)
    assert not any("\ufffd" in chunk for chunk in stream.chunks)
    assert stream.ends == 1


def drawn_pair(tokens, probs, children):
    """A root with drawn children."""
    tree = TokenTree.from_parents([[0, *children]], [[-1, *([0] * len(children))]])
    pad = len(children)
    laws = DraftLaws(
        torch.tensor([[tokens] + [[0] * len(tokens)] * pad]), torch.tensor([[probs] + [[0.0] * len(tokens)] * pad])
    )
    return TokenTree(tree.tokens, tree.parents, tree.depths, tree.scores, tree.num_nodes, laws)


def test_a_forced_rejection_of_an_equal_law_falls_back_to_it(monkeypatch):
    """p == q leaves nothing behind a rejection; rounding must not end in NaN."""
    monkeypatch.setattr(rejection, "uniform", lambda like, generator: torch.full_like(like, 2.0))
    logits = torch.tensor([0.5, 0.5, 0.0]).log().expand(1, 2, 3)
    tree = drawn_pair([0, 1], [0.5, 0.5], [0])
    bonus = RecursiveRejection()(tree, logits, generator=torch.Generator().manual_seed(0)).bonus
    assert int(bonus) in (0, 1)
    assert torch.equal(target_law.residual(logits[0].exp(), logits[0].exp()), logits[0].exp())


def test_siblings_without_replacement_by_hand():
    """q = [.6, .3, .1] drawn twice, p = [.2, .3, .5]: the law of the emitted token is p, enumerated over the draws."""
    q, p = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    emitted = torch.zeros(3)
    for first in range(3):
        accept = min(1.0, float(p[first] / q[first]))
        emitted[first] += q[first] * accept
        left = target_law.residual(p[None], q[None])[0]
        law = target_law.without(q[None], torch.tensor([first]))[0]
        for second in (token for token in range(3) if token != first):
            weight = q[first] * (1 - accept) * law[second]
            again = min(1.0, float(left[second] / law[second]))
            emitted[second] += weight * again
            emitted += weight * (1 - again) * target_law.residual(left[None], law[None])[0]
    torch.testing.assert_close(emitted, p)


@pytest.mark.parametrize("rule", [SamplingAcceptor, RecursiveRejection, TraversalVerification])
def test_temperature_counts(rule):
    target = Target(make_model("qwen3"))
    drafter = TreeDrafter([], len(PROMPT), perfect=False)
    hot = SpeculativeDecoder(target, drafter, rule(5.0), budget=4)
    assert len({tuple(hot.generate(PROMPT, max_new_tokens=4, seed=seed).token_ids) for seed in range(20)}) >= 2


def test_top_p_of_one_sorts_nothing(monkeypatch):
    monkeypatch.setattr(torch, "sort", lambda *a, **k: pytest.fail("sorted"))
    tree = TokenTree.from_parents([[0, 1]], [[-1, 0]])
    SamplingAcceptor(0.8, top_p=1.0)(tree, torch.randn(1, 2, 50))


def test_one_usable_token_is_taken():
    logits = torch.full((1, 1, 5), -torch.inf)
    logits[0, 0, 3] = 1.0
    tree = TokenTree.root_only(torch.tensor([0]))
    for rule in (GreedyAcceptor(), SamplingAcceptor(), RecursiveRejection(), TraversalVerification()):
        assert rule(tree, logits).bonus.tolist() == [3]


def test_no_accepted_node_for_many_rounds_is_no_harm():
    """Penalties make the draft always wrong: the text goes on, one token a round."""
    target = Target(make_model("qwen3"))
    drafter = TreeDrafter([3] * 200, len(PROMPT), perfect=True)

    def ban_three(token_ids, scores):
        return scores.index_fill(1, torch.tensor([3]), -torch.inf)

    result = SpeculativeDecoder(target, drafter, budget=4).generate(
        PROMPT, max_new_tokens=64, eos_token_id=[], logits_processors=[ban_three]
    )
    assert len(result.token_ids) == 64
    assert result.tau == 1.0


def test_a_processor_is_applied_once():
    target = Target(make_model("qwen3"))
    decoder = SpeculativeDecoder(target, TreeDrafter([], len(PROMPT), perfect=True), budget=2)

    def bias(token_ids, scores):
        return scores + 5.0 * (torch.arange(scores.shape[1]) == 7)

    raw, biased = (
        decoder.generate(PROMPT, max_new_tokens=1, log_probs=VOCAB_SIZE, logits_processors=processors).log_probs[0].top
        for processors in ([], [bias])
    )
    raw, biased = dict(raw), dict(biased)
    other = next(token for token in raw if token != 7)
    assert abs((biased[7] - biased[other]) - (raw[7] - raw[other]) - 5.0) < 1e-4


def test_calls_leave_nothing_behind():
    target = Target(make_model("qwen3"))
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.2, do_sample=False)
    before, own = copy.deepcopy(config.to_dict()), copy.deepcopy(target.model.generation_config.to_dict())
    text = SpeculativeDecoder(target, TreeDrafter([], 0, perfect=True), budget=1).generate(PROMPT, generation_config=config)
    decoder = SpeculativeDecoder(target, TreeDrafter(text.token_ids, len(PROMPT), perfect=True), budget=5)
    runs = [decoder.generate(PROMPT, generation_config=config) for _ in range(2)]
    assert runs[0].token_ids == runs[1].token_ids == text.token_ids
    assert [one.num_kept for one in runs[0].rounds] == [one.num_kept for one in runs[1].rounds]
    assert config.to_dict() == before
    assert target.model.generation_config.to_dict() == own


class Interrupting:
    """A streamer that fails in the middle of a text."""

    def __init__(self, error):
        self.error, self.puts = error, 0

    def put(self, ids):
        self.puts += 1
        if self.puts == 3:
            raise self.error

    def end(self):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken pipe"), torch.OutOfMemoryError("out of memory")])
def test_a_decoder_survives_what_ends_a_call(error):
    target = Target(make_model("qwen3"))
    drafter = TreeDrafter([], len(PROMPT), perfect=False)
    decoder = SpeculativeDecoder(target, drafter, budget=5)
    expected = decoder.generate(PROMPT, max_new_tokens=20).token_ids
    with pytest.raises(type(error)):
        decoder.generate(PROMPT, max_new_tokens=20, streamer=Interrupting(error))
    assert decoder.generate(PROMPT, max_new_tokens=20).token_ids == expected


def test_a_draft_that_is_the_target_scores_all():
    """Every drafted token is accepted, and nothing divides by zero where nothing was drafted."""
    target = Target(make_model("qwen3"))
    plain = SpeculativeDecoder(target, TreeDrafter([], 0, perfect=True), budget=1).generate(PROMPT, max_new_tokens=21)
    assert plain.tau == 1.0
    result = SpeculativeDecoder(target, TreeDrafter(plain.token_ids, len(PROMPT), perfect=True), budget=5).generate(
        PROMPT, max_new_tokens=21
    )
    assert result.tau == 5.0
    assert SpeculativeDecoder(target, TreeDrafter([], 0, perfect=True)).generate(PROMPT, max_new_tokens=1).tau is None
