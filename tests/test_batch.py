"""Several prompts at a time: a greedy text is the one it is alone, whoever leaves the batch; sampled ones keep their law."""

from collections import Counter

import pytest
import torch
from conftest import VOCAB_SIZE, make_model, plain_greedy
from scipy.stats import chisquare
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from jetflow import (
    BlockDraftHead,
    Chain,
    ChildSampling,
    DraftHeadConfig,
    DraftModelDrafter,
    EagleDrafter,
    EagleHead,
    EagleHeadConfig,
    FixedShape,
    MergedDrafter,
    ParallelDrafter,
    PromptLookupDrafter,
    RecursiveRejection,
    ReusingDrafter,
    SamplingAcceptor,
    SpeculativeDecoder,
    Target,
    ThroughputBudget,
    TokenTree,
)

# Of different lengths, so that rows are ragged; the third repeats itself.
PROMPTS = [[5, 9, 13, 21, 9, 13, 30, 44, 5, 9], [7], [3, 4, 3, 4, 3, 4, 3], [40, 41, 42, 11, 12]]
NUM_NEW = 24


@pytest.fixture(scope="module")
def target():
    return Target(make_model("qwen3"))


def parallel(target, correction=None, **options):
    torch.manual_seed(1)
    config = DraftHeadConfig.for_target(
        target.config, num_layers=2, block_size=6, mask_token_id=60, taps=(0, 1, 3), correction=correction,
        correction_rank=8 if correction else 128, refinement=options.get("passes", 1) > 1,
    )  # fmt: skip
    return ParallelDrafter(BlockDraftHead(config).eval(), target, **options)


def eagle(target):
    torch.manual_seed(1)
    head = EagleHead(EagleHeadConfig.for_target(target.config, taps=(0, 1, 3))).eval()
    return EagleDrafter(head, target, depth=4)


DRAFTERS = {
    "lookup": lambda target: PromptLookupDrafter(),
    "parallel": parallel,
    "pairwise": lambda target: parallel(target, "gated"),
    "recurrent": lambda target: parallel(target, "recurrent"),
    "two passes": lambda target: parallel(target, passes=2),
    "chain": lambda target: parallel(target, expander=Chain()),
    "drawn": lambda target: parallel(target, expander=FixedShape([-1, 0, 0, 1], [0, 0, 1, 0]), sampling=ChildSampling()),
    "eagle": eagle,
    "merged": lambda target: MergedDrafter([parallel(target), PromptLookupDrafter()]),
    "reusing": lambda target: ReusingDrafter(eagle(target), 0.2),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_text_is_the_one_it_is_alone_and_so_are_its_trees(target, name):
    # Each text ends at its own place, some at once: the third token of the first one ends them.
    alone = [plain_greedy(target.model, prompt, NUM_NEW) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(target, DRAFTERS[name](target), budget=9)

    def run(eos, size):
        trees = [[] for _ in PROMPTS]
        given = {"max_new_tokens": NUM_NEW, "eos_token_id": eos, "batch_size": size}
        results = decoder.generate(PROMPTS, on_round=lambda one: trees[one.index].append(one.tree), **given)
        for one in results:
            assert sum(stats.num_kept for stats in one.rounds) == len(one.token_ids) - 1
        return [(one.token_ids, one.finish_reason) for one in results], [
            # Where the length limit is near, a tree alone is less deep.
            [tree.tokens[0, : int(tree.num_nodes)].tolist() for tree, kept in zip(mine, left(one), strict=True) if kept > 6]
            for one, mine in zip(results, trees, strict=True)
        ]

    def left(result):
        kept = [stats.num_kept for stats in result.rounds]
        return [NUM_NEW - 1 - sum(kept[:number]) for number in range(len(kept))]

    for eos in ([], [alone[0][2], alone[3][7]]):
        texts, trees = run(eos, 1)
        assert sum(len(tree) for mine in trees for tree in mine) > 20
        for size in (2, 3, 4, 7):
            found, others = run(eos, size)
            assert found == texts
            assert others == trees or name == "drawn"
    assert len({len(ids) for ids, _ in texts}) > 1


@pytest.mark.parametrize("paged", [False, True])
def test_every_architecture(model, paged):
    target = Target(model)
    pages = target.new_page_pool(num_pages=64, page_size=8) if paged else None
    decoder = SpeculativeDecoder(target, parallel(target), budget=7, pages=pages)
    results = decoder.generate(PROMPTS, max_new_tokens=NUM_NEW, batch_size=4)
    assert [one.token_ids for one in results] == [plain_greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def test_texts_end_with_the_targets_positions():
    model = make_model("qwen3")
    model.config.max_position_embeddings = 20
    decoder = SpeculativeDecoder(Target(model), PromptLookupDrafter(), budget=9)
    for one, prompt in zip(decoder.generate(PROMPTS, batch_size=4, eos_token_id=[]), PROMPTS, strict=True):
        assert len(one.token_ids) == 20 - len(prompt)
        assert one.finish_reason == "length"


def test_processors_and_log_probs_are_each_rows_own(target):
    processors = [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor([9, 13, 30])]
    given = {"max_new_tokens": 12, "logits_processors": processors, "log_probs": 2}
    decoder = SpeculativeDecoder(target, parallel(target), budget=7)
    singles, results = decoder.generate(PROMPTS, **given), decoder.generate(PROMPTS, batch_size=4, **given)
    for one, other in zip(results, singles, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.token for entry in one.log_probs] == one.token_ids
        for mine, theirs in zip(one.log_probs, other.log_probs, strict=True):
            assert (mine.raw, mine.processed) == pytest.approx((theirs.raw, theirs.processed), abs=1e-4)


def test_a_policy_cuts_all_rows_to_one_size(target):
    seen = []

    class Policy(ThroughputBudget):
        def __call__(self, scores, num_accepted):
            seen.append((len(scores), len(num_accepted), super().__call__(scores, num_accepted)))
            return seen[-1][2]

    decoder = SpeculativeDecoder(target, parallel(target), budget=Policy({1: 1.0, 4: 1.1, 9: 1.2}))
    results = decoder.generate(PROMPTS, batch_size=4, max_new_tokens=NUM_NEW, eos_token_id=[])
    assert [one.token_ids for one in results] == [one.token_ids for one in decoder.generate(
        PROMPTS, max_new_tokens=NUM_NEW, eos_token_id=[])]  # fmt: skip
    assert seen[0][:2] == (4, 0)
    assert seen[1][1] == 4
    assert results[0].rounds[0].num_nodes == seen[0][2]


def test_rounds_say_whose_they_are(target):
    rounds = []
    decoder = SpeculativeDecoder(target, parallel(target), budget=9)
    results = decoder.generate(PROMPTS, batch_size=3, max_new_tokens=NUM_NEW, on_round=rounds.append)
    for index, result in enumerate(results):
        mine = [one for one in rounds if one.index == index]
        assert [one.stats for one in mine] == result.rounds
        assert [token for one in mine for token in one.kept] == result.token_ids[1:]
        for one in mine:
            path = one.acceptance.path[0, : one.num_accepted + 1]
            assert one.tree.tokens.shape[0] == 1
            assert one.tree.tokens[0, path][1:].tolist() == one.kept[: one.num_accepted]
    # A round's seconds are shared: all shares together are no more than the whole.
    shares = sum(sum(one.stats.seconds.values()) for one in rounds if one.index < 3)
    assert shares <= max(result.seconds for result in results[:3])


@pytest.mark.parametrize("drawn", [False, True])
def test_sampled_texts_keep_their_law_and_their_seed(target, drawn):
    # Between too flat and too sharp for frequent pairs of tokens.
    temperature, size = 1.2, 500
    acceptor = RecursiveRejection(temperature) if drawn else SamplingAcceptor(temperature)
    decoder = SpeculativeDecoder(target, DRAFTERS["drawn"](target) if drawn else parallel(target), acceptor, budget=4)

    def texts(seed):
        results = decoder.generate(PROMPTS[:1] * size, seed=seed, max_new_tokens=3, eos_token_id=[], batch_size=size)
        return [tuple(one.token_ids) for one in results]

    assert texts(1) == texts(1)
    found = Counter(text for seed in range(8) for text in texts(seed))
    first = Counter(text[0] for text in found.elements()).most_common(1)[0][0]
    with torch.no_grad():
        second_law = (target.model(torch.tensor([[*PROMPTS[0], first]])).logits[0, -1] / temperature).softmax(-1)
        ids = torch.tensor([[*PROMPTS[0], first, token] for token in range(VOCAB_SIZE)])
        third_laws = (target.model(ids).logits[:, -1] / temperature).softmax(-1)
    law = (second_law[:, None] * third_laws).flatten().double()
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for (token, second, third), count in found.items():
        counts[second, third] += count if token == first else 0
    counts = counts.flatten()
    expected = law / law.sum() * counts.sum()
    common = expected >= 5
    assert int(common.sum()) >= 8
    observed, wanted = (torch.cat([one[common], one[~common].sum()[None]]).numpy() for one in (counts, expected))
    assert chisquare(observed, wanted).pvalue > 1e-3


class OneAtATime(PromptLookupDrafter):
    def reset(self, batch_size):
        pass


class TooFew(PromptLookupDrafter):
    def propose(self, context, budget):
        return TokenTree.root_only(context.root_tokens[:1])


def test_what_takes_one_text_at_a_time_is_refused(target):
    def generate(drafter, size=2, **options):
        streamer = options.pop("streamer", None)
        return SpeculativeDecoder(target, drafter, budget=4, **options).generate(PROMPTS, batch_size=size, streamer=streamer)

    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        generate(PromptLookupDrafter(), 0)
    with pytest.raises(ValueError, match=r"needs a drafter with keep_rows\(rows\), which OneAtATime lacks"):
        generate(OneAtATime())
    assert len(generate(OneAtATime(), 1)) == 4
    with pytest.raises(ValueError, match="keep_rows"):
        generate(DraftModelDrafter(target, target))
    with pytest.raises(ValueError, match="a streamer shows one text at a time and needs batch_size=1, got 2"):
        generate(PromptLookupDrafter(), streamer=object())
    with pytest.raises(ValueError, match="fixed_width=8 takes one text at a time and needs batch_size=1, got 2"):
        generate(PromptLookupDrafter(), fixed_width=8)
    with pytest.raises(ValueError, match="must return 2 trees of at most 4 nodes"):
        generate(TooFew())
