"""The recorded round steps through: drafting, expansion at a chosen budget, verification, commit; by mouse and by keyboard."""

import json
from pathlib import Path

import pytest

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "assets" / "round.json").read_text())
NODES, ACCEPTED = RECORD["nodes"], RECORD["accepted"]
STEPS = ("draft", "expand", "verify", "commit")


class Round:
    """The page as a reader handles it."""

    def __init__(self, page, address: str):
        self.page = page
        page.goto(f"{address}round/")
        page.wait_for_selector("#round .round-tree table")
        self.tree, self.slider = page.locator(".round-tree"), page.locator("#round input")

    def press(self, step: str) -> None:
        self.page.locator("#round button", has_text=step).click()

    def choose(self, budget: int) -> None:
        self.slider.fill(str(budget))

    def step(self) -> str:
        pressed = self.page.locator("#round button[aria-pressed=true]")
        assert pressed.count() == 1
        return pressed.inner_text().split()[1]

    def caption(self) -> str:
        return self.page.locator(".round-caption").inner_text()

    def text(self) -> str:
        return self.page.locator(".round-text").evaluate("one => one.textContent")

    def num_nodes(self) -> int:
        return self.tree.locator("text").count()

    def num_kept(self) -> int:
        return self.tree.locator("text.round-kept").count()


@pytest.fixture(params=[1280, 390])
def shown(request, site, window):
    return Round(window(request.param), site.address)


def test_drafting_shows_one_law_for_each_depth(shown):
    assert shown.step() == "draft"
    rows = shown.tree.locator("tr")
    assert rows.count() == max(node["depth"] for node in NODES)
    for depth in range(1, rows.count() + 1):
        likeliest = max((node for node in NODES if node["depth"] == depth), key=lambda node: node["probability"])
        first = rows.nth(depth - 1).locator("span").first.inner_text()
        assert first.split()[-1] == f"{likeliest['probability']:.2f}"
        assert rows.nth(depth - 1).locator("code").first.inner_text().replace("·", " ").replace("↵", "\n") == likeliest["text"]
    assert shown.text() == RECORD["before"]


def test_expansion_shows_the_best_tree_of_the_chosen_budget(shown):
    shown.press("expand")
    for budget in (16, 1, 40, len(NODES)):
        shown.choose(budget)
        assert shown.page.locator("#round output").inner_text() == str(budget)
        assert shown.num_nodes() == budget
        assert shown.tree.locator("line").count() == budget - 1
        # Nothing but the root is text yet.
        assert shown.num_kept() == 1
        expected = sum(node["path"] for node in NODES[:budget])
        assert f"tree of {budget} node" in shown.caption()
        assert f"{expected:.2f}" in shown.caption()


@pytest.mark.parametrize("budget", [1, 4, 16, 40, len(NODES)])
def test_verification_and_commit_keep_the_path_inside_the_tree(shown, budget):
    path = [node for node in ACCEPTED if node < budget]
    rest = [NODES[node]["text"] for node in ACCEPTED[len(path) :]] + [RECORD["bonus"]]
    shown.choose(budget)
    shown.press("verify")
    assert shown.num_kept() == 1 + len(path)
    assert shown.tree.locator("line.round-kept").count() == len(path)
    assert f"accepts {len(path)} drafted token" in shown.caption()
    shown.press("commit")
    assert shown.step() == "commit"
    assert shown.text() == RECORD["before"] + "".join(NODES[node]["text"] for node in path) + rest[0]
    assert f"{len(path) + 1} token" in shown.caption()


def test_nodes_do_not_overlap(shown):
    shown.press("expand")
    shown.choose(len(NODES))
    boxes = shown.tree.locator("text").evaluate_all(
        "all => all.map((one) => { const b = one.getBBox(); return [b.x, b.y, b.width, b.height]; })"
    )
    for i, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[:i]:
            apart = x + width <= other_x or other_x + other_width <= x or y + height <= other_y or other_y + other_height <= y
            assert apart, (boxes[i], NODES[i])
    # Every node can be scrolled to.
    assert shown.tree.evaluate("one => one.scrollWidth") >= max(x + width for x, _, width, _ in boxes)


def test_the_keyboard_is_enough(shown):
    page, focused = shown.page, shown.page.locator("#round :focus")
    page.locator("#round button").first.focus()
    for step in STEPS[1:]:
        page.keyboard.press("Tab")
        assert step in focused.inner_text()
        assert focused.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        page.keyboard.press("Enter" if step != "verify" else "Space")
        assert shown.step() == step
    page.keyboard.press("Tab")
    for key, budget in (("ArrowRight", 17), ("ArrowLeft", 16), ("End", len(NODES)), ("Home", 1)):
        page.keyboard.press(key)
        assert page.locator("#round output").inner_text() == str(budget)
    assert shown.num_nodes() == 1
    # The tree is wider than the page; it takes the focus, so that arrows scroll it.
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#round input").focus()
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    assert "round-tree" in focused.get_attribute("class")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.round-tree').scrollLeft > 0")


def test_what_changes_is_announced(shown):
    assert shown.page.locator(".round-caption").get_attribute("aria-live") == "polite"


def test_a_missing_record_is_said_and_not_hidden(site, browser):
    page = browser.new_page()
    page.route("**/round.json", lambda route: route.abort())
    page.goto(f"{site.address}round/")
    page.wait_for_function("document.querySelector('.round-caption').textContent.includes('could not be loaded')")
    page.close()
