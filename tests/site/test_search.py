"""The search box finds the page that a reader looks for, on a desk and on a phone."""

import re
from urllib.parse import urlsplit

import pytest

# What a reader types, and the page that has to be among the first three.
QUERIES = {
    "traversal verification": "parts/acceptors/",
    "ThroughputBudget": "parts/budgets/",
    "bonus token": "concepts/",
    "scoring function": "parts/scoring/",
    "write your own mask": "parts/masks/",
    "prompt lookup": "parts/drafters/",
    "bfloat16": "losslessness/",
    "stop token": "faq/",
    "forward KL": "parts/losses/",
    "assisted generation": "coming-from/transformers/",
    "EAGLE-3": "coming-from/eagle/",
    "speculators": "coming-from/vllm/",
    "pip install": "install/",
    "Triton kernel": "kernels/",
    "regenerate": "training/",
    "pairwise correction": "branch-conditioned/",
    "layers": "design/",
    "assistant_model": "coming-from/transformers/",
    "num_speculative_tokens": "parts/budgets/",
}


def search(page, words: str) -> list[str]:
    """Types words and waits until the list of results stays as it is; returns their addresses."""
    if page.viewport_size["width"] < 600:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    page.wait_for_function("/No matching|match/.test(document.querySelector('.md-search-result__meta').textContent)")
    found, before = [], None
    while found != before:
        page.wait_for_timeout(1000)
        before, found = found, page.locator(".md-search-result__item > a").evaluate_all("all => all.map((one) => one.href)")
    return found


@pytest.mark.parametrize("width", [1280, 390])
def test_search_finds_pages(site, window, width):
    page = window(width)
    missed = {}
    for words, expected in QUERIES.items():
        page.goto(site.address)
        pages = [urlsplit(place).path.removeprefix("/") for place in search(page, words)]
        first = list(dict.fromkeys(pages))[:3]
        if expected not in first:
            missed[words] = first
    assert not missed


def test_a_result_opens_its_section_with_the_words_marked(site, window):
    page = window(1280)
    page.goto(site.address)
    search(page, "traversal verification")
    page.locator(".md-search-result__item > a[href*='parts/acceptors/'][href*='#']").first.click()
    page.wait_for_url(re.compile("/parts/acceptors/"))
    page.wait_for_selector("article mark")
    assert page.locator("article mark").first.inner_text().lower().startswith("traversal")


def test_words_that_stand_nowhere_find_nothing(site, window):
    page = window(1280)
    page.goto(site.address)
    assert search(page, "xylophone") == []
    assert "No matching" in page.locator(".md-search-result__meta").inner_text()
