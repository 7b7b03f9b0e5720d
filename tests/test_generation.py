"""Generation settings mean what they mean in transformers, token by token, or are refused."""

import random

import pytest
import torch
from conftest import VOCAB_SIZE, make_model
from scipy.stats import chisquare
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, MinLengthLogitsProcessor

from jetflow import (
    AcceptanceTable,
    BestFirst,
    BlockDraftHead,
    ChildSampling,
    DraftHeadConfig,
    GreedyAcceptor,
    ParallelDrafter,
    RecursiveRejection,
    SamplingAcceptor,
    SpeculativeDecoder,
    Target,
    ThroughputBudget,
    TokenTree,
    TraversalVerification,
)
from jetflow.processing import CountPenalty, PathProcessors

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
NUM_CONFIGS = 200
REFUSED = {
    "num_beams",
    "guidance_scale",
    "prompt_lookup_num_tokens",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
}


class TreeDrafter:
    """Drafts what the target will write (perfect), or random trees around some of it (bad)."""

    def __init__(self, text, prompt_length, *, perfect, seed=0):
        self.text, self.prompt_length, self.perfect = text, prompt_length, perfect
        self.random = random.Random(seed)

    def propose(self, context, budget):
        done = int(context.prefix_lens[0]) + 1 - self.prompt_length
        tokens, parents = [int(context.root_tokens[0])], [-1]
        spine = self.text[done : done + budget - 1] if self.perfect else self.text[done : done + self.random.randrange(3)]
        for token in spine:
            parents.append(len(tokens) - 1)
            tokens.append(token)
        used = set(zip(parents, tokens, strict=True))
        while not self.perfect and len(tokens) < budget:
            pair = (self.random.randrange(len(tokens)), self.random.randrange(VOCAB_SIZE))
            if pair not in used:
                used.add(pair)
                parents.append(pair[0])
                tokens.append(pair[1])
        return TokenTree.from_parents([tokens], [parents])


def random_config(rng):
    """A few settings at a time, so that each meets each."""
    choices = {
        "repetition_penalty": lambda: rng.choice([0.8, 1.1, 1.7]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3]),
        "bad_words_ids": lambda: [[rng.randrange(3, VOCAB_SIZE)] for _ in range(3)] + [[9, 13]],
        "suppress_tokens": lambda: rng.sample(range(3, VOCAB_SIZE), 8),
        "begin_suppress_tokens": lambda: rng.sample(range(3, VOCAB_SIZE), 20),
        "min_new_tokens": lambda: rng.choice([3, 10]),
        "min_length": lambda: len(PROMPT) + rng.choice([2, 8]),
        "forced_eos_token_id": lambda: 2,
        "forced_bos_token_id": lambda: 1,
        "eos_token_id": lambda: rng.choice([2, [2, 7, 19], list(range(2, 30))]),
        "exponential_decay_length_penalty": lambda: (3, 1.5),
        "sequence_bias": lambda: [[[rng.randrange(VOCAB_SIZE)], 4.0], [[9, 13], -6.0]],
        "remove_invalid_values": lambda: True,
        "renormalize_logits": lambda: True,
        # Refused, or without effect on greedy text.
        "num_beams": lambda: rng.choice([1, 3]),
        "guidance_scale": lambda: 2.0,
        "prompt_lookup_num_tokens": lambda: 4,
        "temperature": lambda: 0.7,
    }
    names = rng.sample(sorted(choices), rng.choice([1, 1, 2, 3, 4]))
    return {name: choices[name]() for name in names}


@pytest.mark.parametrize("part", range(4))
def test_random_configs_give_the_ids_of_transformers_or_an_error(part):
    """200 configs, each with a perfect and a bad drafter: never a silent difference."""
    targets = {name: Target(make_model(name)) for name in ("qwen3", "llama")}
    refused = 0
    for number in range(part, NUM_CONFIGS, 4):
        rng = random.Random(number)
        settings = {"max_new_tokens": rng.choice([1, 5, 16]), "do_sample": False} | random_config(rng)
        target = targets[rng.choice(sorted(targets))]
        config = GenerationConfig(**settings)
        if REFUSED & {name for name, value in settings.items() if value != 1}:
            decoder = SpeculativeDecoder(target, TreeDrafter([], len(PROMPT), perfect=True), budget=6)
            with pytest.raises(ValueError, match="has no meaning"):
                decoder.generate(PROMPT, generation_config=config)
            refused += 1
            continue
        ids = torch.tensor([PROMPT])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        expected = out[0, len(PROMPT) :].tolist()
        for perfect in (True, False):
            drafter = TreeDrafter(expected, len(PROMPT), perfect=perfect, seed=number)
            result = SpeculativeDecoder(target, drafter, budget=6).generate(PROMPT, generation_config=config)
            assert result.token_ids == expected, (settings, perfect)
    assert 0 < refused < NUM_CONFIGS // 6


def test_what_trees_cannot_do_is_named():
    target = Target(make_model("qwen3"))
    decoder = SpeculativeDecoder(target, TreeDrafter([], 0, perfect=True))
    # The first two count the prompt of decoder-only models as the encoder's input.
    encoder = ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2})
    for setting in (
        *encoder,
        {"num_beams": 4},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.6},
        {"prompt_lookup_num_tokens": 3},
    ):
        name = next(iter(setting))
        with pytest.raises(ValueError, match=f"generation_config.{name}=.* has no meaning for tree decoding"):
            decoder.generate(PROMPT, generation_config=GenerationConfig(max_new_tokens=4, **setting))
    for beside in ({"max_new_tokens": 3}, {"eos_token_id": 4}, {"stop_strings": "a"}, {"logits_processors": [lambda i, s: s]}):
        with pytest.raises(ValueError, match=f"{next(iter(beside))} and generation_config exclude each other"):
            decoder.generate(PROMPT, generation_config=GenerationConfig(), **beside)


def test_sampling_follows_the_config():
    """One law with all of transformers' warpers: the second token's frequencies against its processed law."""
    target = Target(make_model("qwen3"))
    settings = {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.3}
    config = GenerationConfig(do_sample=True, max_new_tokens=1, eos_token_id=None, **settings)
    decoder = SpeculativeDecoder(target, TreeDrafter([], len(PROMPT), perfect=True), budget=1)
    ids = torch.tensor([PROMPT])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, output_scores=True, return_dict_in_generate=True
    )
    law = out.scores[0][0].softmax(-1).double()
    draws = [decoder.generate(PROMPT, generation_config=config, seed=i).token_ids[0] for i in range(1500)]
    counts = torch.bincount(torch.tensor(draws), minlength=VOCAB_SIZE)
    assert not counts[law == 0].any()
    used = law > 0
    assert chisquare(counts[used], law[used] / law[used].sum() * len(draws)).pvalue > 1e-3


def test_the_decoders_acceptor_must_go_with_the_config():
    target, config = Target(make_model("qwen3")), GenerationConfig(max_new_tokens=3, do_sample=True)
    drafter = TreeDrafter([], len(PROMPT), perfect=True)
    with pytest.raises(ValueError, match="do_sample=True does not go with the decoder's GreedyAcceptor"):
        SpeculativeDecoder(target, drafter, GreedyAcceptor()).generate(PROMPT, generation_config=config)
    with pytest.raises(ValueError, match=r"SamplingAcceptor must have 1, got 0\.5"):
        SpeculativeDecoder(target, drafter, SamplingAcceptor(0.5)).generate(PROMPT, generation_config=config)
    assert SpeculativeDecoder(target, drafter, RecursiveRejection()).generate(PROMPT, generation_config=config).token_ids


def test_frequency_and_presence_penalties_count_along_each_path():
    target = Target(make_model("qwen3"))
    penalty = CountPenalty(len(PROMPT), frequency=1.5, presence=0.5)
    # One token after the other by hand.
    expected = []
    for _ in range(20):
        logits = target.model(torch.tensor([PROMPT + expected])).logits[0, -1].detach()
        counts = torch.bincount(torch.tensor(expected, dtype=torch.int64), minlength=VOCAB_SIZE)
        expected.append(int((logits - 1.5 * counts - 0.5 * (counts > 0)).argmax()))
    for perfect in (True, False):
        decoder = SpeculativeDecoder(target, TreeDrafter(expected, len(PROMPT), perfect=perfect), budget=6)
        result = decoder.generate(PROMPT, max_new_tokens=20, eos_token_id=[], logits_processors=[penalty])
        assert result.token_ids == expected


class Counting(LogitsProcessor):
    """Keeps count of its calls, as a grammar that is advanced by each call does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, token_ids, scores):
        self.calls += 1
        return scores


def test_processors_with_state_are_refused():
    decoder = SpeculativeDecoder(Target(make_model("qwen3")), TreeDrafter([], len(PROMPT), perfect=True))
    with pytest.raises(ValueError, match="logits processor Counting keeps state between calls"):
        decoder.generate(PROMPT, max_new_tokens=2, logits_processors=[Counting()])
    drawn = iter(range(100))
    with pytest.raises(ValueError, match="logits processor function keeps state"):
        decoder.generate(PROMPT, max_new_tokens=2, logits_processors=[lambda ids, scores: scores + next(drawn)])


def test_own_processors_see_each_nodes_own_path():
    """A grammar: after an even token an odd one must follow, and the other way round."""

    def alternate(token_ids, scores):
        even = torch.arange(scores.shape[1]) % 2 == 0
        return scores.masked_fill(even == (token_ids[:, -1:] % 2 == 0), -torch.inf)

    target = Target(make_model("qwen3"))
    drafter = TreeDrafter([], len(PROMPT), perfect=False)
    ids = (
        SpeculativeDecoder(target, drafter, budget=9)
        .generate(PROMPT, max_new_tokens=20, eos_token_id=[], logits_processors=[alternate])
        .token_ids
    )
    plain = (
        SpeculativeDecoder(target, drafter, budget=1)
        .generate(PROMPT, max_new_tokens=20, eos_token_id=[], logits_processors=[alternate])
        .token_ids
    )
    assert ids == plain
    assert all((a + b) % 2 == 1 for a, b in zip([PROMPT[-1], *ids], ids, strict=False))


def test_forbidden_nodes_are_pruned_before_the_target_sees_them():
    processors = PathProcessors([MinLengthLogitsProcessor(14, 2)], VOCAB_SIZE)
    tree = TokenTree.from_parents([[5, 2, 8, 4, 2]], [[-1, 0, 0, 1, 2]])
    pruned = processors.prune(PROMPT, tree)
    assert pruned.tokens.tolist() == [[5, 8]]
    assert pruned.parents.tolist() == [[-1, 0]]
    # Long enough, nothing is forbidden any more.
    assert processors.prune([*PROMPT, 3, 3, 3, 3], tree) is tree


@pytest.mark.parametrize("eos", [7, [7, 11], torch.tensor(7), torch.tensor([7, 11]), []])
def test_ids_that_end_a_text_come_in_any_form(eos):
    target = Target(make_model("qwen3"))
    decoder = SpeculativeDecoder(target, TreeDrafter([], len(PROMPT), perfect=False), budget=5)
    free = decoder.generate(PROMPT, max_new_tokens=30, eos_token_id=[]).token_ids
    ends = eos.flatten().tolist() if isinstance(eos, torch.Tensor) else [eos] if isinstance(eos, int) else eos
    place = next((i for i, token in enumerate(free) if token in ends), len(free) - 1)
    assert decoder.generate(PROMPT, max_new_tokens=30, eos_token_id=eos).token_ids == free[: place + 1]


def test_log_probs_are_those_of_the_emitted_tokens():
    target = Target(make_model("qwen3"))
    text = SpeculativeDecoder(target, TreeDrafter([], 0, perfect=False), budget=1).generate(PROMPT, max_new_tokens=12).token_ids
    banned = (text[0] + 1) % VOCAB_SIZE

    def ban(token_ids, scores):
        return scores.index_fill(1, torch.tensor([banned]), -torch.inf)

    for perfect in (True, False):
        drafter = TreeDrafter(text, len(PROMPT), perfect=perfect)
        result = SpeculativeDecoder(target, drafter, budget=5).generate(
            PROMPT, max_new_tokens=12, log_probs=3, logits_processors=[ban]
        )
        ids = torch.tensor([PROMPT + result.token_ids])
        logits = target.model(ids).logits[0, len(PROMPT) - 1 : -1].detach()
        raw, processed = logits.log_softmax(-1), ban(None, logits).log_softmax(-1)
        assert [one.token for one in result.log_probs] == result.token_ids
        for place, one in enumerate(result.log_probs):
            assert abs(one.raw - float(raw[place, one.token])) < 1e-4
            assert abs(one.processed - float(processed[place, one.token])) < 1e-4
            best = processed[place].topk(3)
            assert [token for token, _ in one.top] == best.indices.tolist()
    plain = SpeculativeDecoder(target, drafter).generate(PROMPT, max_new_tokens=3)
    assert plain.log_probs is None
    with pytest.raises(ValueError, match="log_probs must be at least 0, got -1"):
        SpeculativeDecoder(target, drafter).generate(PROMPT, log_probs=-1)


def test_drawn_trees_decode_and_repeat_by_seed():
    target = Target(make_model("qwen3"))
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "block_size": 6, "mask_token_id": 60, "taps": (0, 1, 3)}
    head = BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes)).eval()
    drafter = ParallelDrafter(head, target, BestFirst(AcceptanceTable()), sampling=ChildSampling())
    decoder = SpeculativeDecoder(target, drafter, TraversalVerification(), budget=8)
    before = torch.get_rng_state()
    first, again, other = (decoder.generate(PROMPT, max_new_tokens=20, seed=seed).token_ids for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="budget policy cuts trees by the scores of their tokens"):
        SpeculativeDecoder(target, drafter, TraversalVerification(), ThroughputBudget({4: 1.0})).generate(PROMPT)
