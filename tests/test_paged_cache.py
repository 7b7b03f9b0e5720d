"""The paged cache writes the same text as the contiguous one, and every page comes back."""

import pytest
import torch
from conftest import make_model, plain_greedy
from test_decoding import ScriptedDrafter

from jetflow import SpeculativeDecoder, Target
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.paged_cache import PagedTreeCache

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kind", ["perfect", "random", "second_child"])
def test_text_is_that_of_plain_decoding(page_size, kind):
    model = make_model("qwen3")
    expected, target = plain_greedy(model, PROMPT, 25), Target(model)
    pool = target.new_page_pool(-(-64 // page_size), page_size)
    decoder = SpeculativeDecoder(target, ScriptedDrafter(kind, expected, len(PROMPT)), budget=7, pages=pool)
    for _ in range(2):
        assert decoder.generate(PROMPT, max_new_tokens=25).token_ids == expected
        assert pool.num_free == pool.num_pages


def test_every_target(model):
    target = Target(model)
    pool = target.new_page_pool(12, 5)
    result = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, pages=pool).generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain_greedy(model, PROMPT, 20)
    assert pool.num_free == 12


def test_two_decoders_share_a_pool():
    model = make_model("qwen3")
    target = Target(model)
    pool = target.new_page_pool(20, 4)
    decoders = [SpeculativeDecoder(target, PromptLookupDrafter(), budget=budget, pages=pool) for budget in (1, 7)]
    expected = plain_greedy(model, PROMPT, 10)
    for decoder in (*decoders, *decoders):
        assert decoder.generate(PROMPT, max_new_tokens=10).token_ids == expected
    assert pool.num_free == 20


def test_too_few_pages_raise_before_anything_is_written_and_all_come_back():
    target = Target(make_model("qwen3"))
    pool = target.new_page_pool(3, 4)
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, pages=pool)
    with pytest.raises(ValueError, match="pages of 4 tokens are needed, but 0 of 3 are free"):
        decoder.generate(PROMPT, max_new_tokens=25)
    assert pool.num_free == 3
    cache = PagedTreeCache(pool, 2)
    with pytest.raises(ValueError, match="4 pages of 4 tokens are needed, but 3 of 3 are free"):
        cache.reserve(5)
    assert pool.num_free == 3
    assert not pool.memory[:, :, :].isnan().any()


def test_pages_come_back_after_an_error_in_the_middle():
    target = Target(make_model("qwen3"))
    pool = target.new_page_pool(30, 4)
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, pages=pool)

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPT, max_new_tokens=25, on_round=stop)
    assert pool.num_free == 30


def test_rows_of_different_lengths_and_dropped_rows():
    target = Target(make_model("qwen3"))
    pool = target.new_page_pool(20, 4)
    cache = PagedTreeCache(pool, 3)
    generator = torch.Generator().manual_seed(0)
    cache.lengths = [3, 9, 0]
    cache.reserve(4)
    heads, dim = pool.memory.shape[-2:]
    keys, values = torch.randn(2, 3, heads, 4, dim, generator=generator)
    found, _ = cache.write(0, keys, values)
    for row, length in enumerate(cache.lengths):
        assert torch.equal(found[row, :, length : length + 4], keys[row])
    cache.commit(torch.tensor([[0, 2], [0, 3], [0, 0]]), [2, 2, 1])
    assert cache.lengths == [5, 11, 1]
    after, _ = cache.write(0, keys, values)
    assert torch.equal(after[1, :, 9:11], keys[1][:, [0, 3]])
    cache.keep_rows([2, 0])
    assert cache.lengths == [1, 5]
    assert pool.num_free == 20 - sum(len(pages) for pages in cache._tables)
    cache.reset()
    assert pool.num_free == 20


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_sizes_below_one_are_named(pages, size):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Target(make_model("qwen3")).new_page_pool(pages, size)


def test_a_pass_that_broke_off_leaves_no_trace():
    model = make_model("qwen3")
    target = Target(model)
    pool = target.new_page_pool(30, 4)
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=7, pages=pool)
    decoder.generate(PROMPT, max_new_tokens=2)
    # As after an error within a tree pass of the kernel, which reads pages as they are.
    decoder._verifier.cache.hands_out_pages = True
    decoder._verifier.release()
    assert decoder.generate(PROMPT, max_new_tokens=10).token_ids == plain_greedy(model, PROMPT, 10)
