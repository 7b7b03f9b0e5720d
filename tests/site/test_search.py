"""The search box finds the page that a reader looks for, on a desk and on a phone."""

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
    "layers": "design/",
}


def ask(page, words: str) -> None:
    """Asks once, with all words: while a reader types, results of the first letters come and go."""
    box = page.locator("input.md-search__input")
    box.click()
    box.fill(words)
    # The theme reads the box when a key is let go.
    page.keyboard.press("End")


@pytest.mark.parametrize("width", [1280, 390])
def test_search_finds_pages(site, window, width):
    page = window(width)
    missed = {}
    for words, expected in QUERIES.items():
        page.goto(site.address)
        if width < 600:
            page.locator("label.md-header__button[for=__search]").click()
        ask(page, words)
        page.wait_for_selector(".md-search-result__link")
        found = page.locator(".md-search-result__item > a").evaluate_all(
            "all => all.map((one) => new URL(one.href).pathname.slice(1))"
        )
        first = list(dict.fromkeys(found))[:3]
        if expected not in first:
            missed[words] = first
    assert not missed


def test_a_result_opens_its_page(site, window):
    page = window(1280)
    page.goto(site.address)
    ask(page, "traversal verification")
    page.wait_for_selector(".md-search-result__link")
    page.locator(".md-search-result__item > a", has_text="Acceptors").first.click()
    page.wait_for_url("**/parts/acceptors/**")
    assert page.locator("h1").inner_text().startswith("Acceptors")


def test_words_that_stand_nowhere_find_nothing(site, window):
    page = window(1280)
    page.goto(site.address)
    ask(page, "xylophone")
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('No matching')")
    assert page.locator(".md-search-result__link").count() == 0
