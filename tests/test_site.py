"""The built pages in a browser: whole, readable on a desk and on a phone, searchable; the recorded round steps through.

`make test-docs` runs this. `--chromium` alone takes Playwright's own browser or one of the machine's, `--chromium PATH` that.
"""

import functools
import json
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag

import pytest

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
WIDTHS = {"desk": 1280, "phone": 390}
# Text below this is not read, in CSS pixels.
SMALLEST_TEXT = 11
# What stands out of the window to the right and is not inside something that scrolls by itself.
OVERFLOWING = """() => {
  const scrolls = (element) => element && element !== document.body
    && (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const stands_out = (element) => element.getClientRects().length && element.getBoundingClientRect().right > innerWidth + 1;
  return [...document.querySelectorAll("article *")].filter((one) => stands_out(one) && !scrolls(one.parentElement))
    .map((one) => one.tagName + ": " + one.textContent.slice(0, 60));
}"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll("article p, article td, article li, article pre code")]
  .filter((one) => one.offsetParent && one.textContent.trim()).map((one) => parseFloat(getComputedStyle(one).fontSize)))"""
PICTURES = """() => [...document.querySelectorAll("article img")]
  .filter((one) => getComputedStyle(one).display !== "none").map((one) => [one.src, one.naturalWidth])"""
PLACES = """() => ({links: [...document.querySelectorAll("a[href]")].map((one) => one.href),
  ids: [...document.querySelectorAll("[id]")].map((one) => one.id)})"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory, request):
    """Address and folder of the built pages, served on this machine."""
    if request.config.getoption("--chromium") is None:
        pytest.skip("needs --chromium: make test-docs")
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()


@pytest.fixture(scope="module")
def browser(site, request):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        path = request.config.getoption("--chromium")
        if not path and not Path(playwright.chromium.executable_path).exists():
            path = next(filter(None, map(shutil.which, BROWSERS)), None)
            if path is None:
                pytest.skip(f"no browser: playwright install chromium, or one of {', '.join(BROWSERS)}, or --chromium PATH")
        opened = playwright.chromium.launch(executable_path=path or None, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def window(site, browser):
    """Opens windows of a width; at the end nothing may have gone wrong in any of them."""
    address, _ = site
    wrong, opened = [], []

    def new(width: int, **settings):
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        # Leaving a page breaks off what it was still loading.
        page.on("requestfailed", lambda one: None if "ABORTED" in one.failure else wrong.append(f"{one.failure}: {one.url}"))
        page.on("response", lambda one: wrong.append(f"{one.status}: {one.url}") if one.status >= 400 else None)
        page.on("request", lambda one: None if one.url.startswith((address, "data:", "blob:")) else wrong.append(one.url))
        return page

    yield new
    for context in opened:
        context.close()
    assert not wrong


def addresses(site) -> list[str]:
    """All pages, the one for wrong addresses included."""
    address, folder = site
    pages = sorted(path.relative_to(folder) for path in folder.rglob("index.html"))
    return [address + str(path).removesuffix("index.html") for path in pages] + [f"{address}404.html"]


@pytest.mark.parametrize("device", WIDTHS)
def test_every_page_is_whole_and_readable(site, window, device):
    page = window(WIDTHS[device])
    bad = []
    for place in addresses(site):
        page.goto(place)
        if page.evaluate("document.documentElement.scrollWidth") > WIDTHS[device]:
            bad.append((place, "scrolls sideways"))
        bad += [(place, one) for one in page.evaluate(OVERFLOWING)]
        smallest = page.evaluate(SMALLEST)
        if smallest is not None and smallest < SMALLEST_TEXT:
            bad.append((place, f"text of {smallest} pixels"))
        bad += [(place, f"no picture: {source}") for source, width in page.evaluate(PICTURES) if width == 0]
    assert not bad


def test_links_and_anchors_lead_somewhere(site, window):
    page = window(1280)
    found = {}
    for place in addresses(site):
        page.goto(place)
        found[place] = page.evaluate(PLACES)
    broken = []
    for place, content in found.items():
        for link in content["links"]:
            target, anchor = urldefrag(link)
            if not link.startswith(site[0]) or (site[1] / target.removeprefix(site[0])).is_file():
                continue
            if target not in found or (anchor and anchor not in found[target]["ids"]):
                broken.append((place, link))
    assert len(found) > 25
    assert not broken


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_follow_the_colour_scheme(site, window, scheme):
    page = window(1280, color_scheme=scheme)
    page.goto(site[0])
    shown = [source for source, _ in page.evaluate(PICTURES)]
    assert shown
    assert all(f"-{scheme}.svg" in source for source in shown)


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize(("words", "expected"), [("traversal verification", "acceptors/"), ("ThroughputBudget", "budgets/")])
def test_search_finds_pages(site, window, device, words, expected):
    page = window(WIDTHS[device])
    page.goto(site[0])
    if device == "phone":
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    page.wait_for_selector(".md-search-result__link")
    # One item for each page, with the places in it below.
    pages = page.locator(".md-search-result__item > a").evaluate_all("all => all.map((one) => one.href)")
    assert any(f"parts/{expected}" in place for place in pages[:3]), pages


@pytest.mark.parametrize("device", WIDTHS)
def test_the_recorded_round_can_be_stepped_through(site, window, device):
    record = json.loads((ROOT / "docs" / "assets" / "round.json").read_text())
    page = window(WIDTHS[device])
    page.goto(f"{site[0]}round/")
    page.wait_for_selector("#round .round-tree table")
    caption, text = page.locator(".round-caption"), page.locator(".round-text")
    nodes, kept = page.locator(".round-tree text"), page.locator(".round-tree text.round-kept")

    def press(step: int) -> None:
        page.locator(f"#round button[data-step='{step}']").click()
        assert page.locator("#round button[aria-pressed=true]").count() == 1
        assert page.locator(f"#round button[data-step='{step}']").get_attribute("aria-pressed") == "true"

    def choose(budget: int) -> None:
        page.locator("#round input").fill(str(budget))
        assert page.locator("#round output").inner_text() == str(budget)

    # Drafting: one law for each depth.
    deepest = max(node["depth"] for node in record["nodes"])
    assert page.locator(".round-tree tr").count() == deepest
    assert text.inner_text() == record["before"]

    # Expansion: as many nodes as the budget, none accepted yet but the root.
    press(1)
    assert nodes.count() == 16
    assert kept.count() == 1
    choose(40)
    assert nodes.count() == 40
    assert "best tree of 40 nodes" in caption.inner_text()

    # Verification: the target's path inside the tree.
    press(2)
    path = [node for node in record["accepted"] if node < 40]
    assert kept.count() == 1 + len(path)
    assert f"accepts {len(path)} drafted tokens" in caption.inner_text()
    choose(4)
    assert kept.count() == 1 + len([node for node in record["accepted"] if node < 4])

    # Commit: accepted tokens and the target's own are text.
    choose(40)
    press(3)
    written = "".join(record["nodes"][node]["text"] for node in path)
    assert text.evaluate("one => one.textContent") == record["before"] + written + record["bonus"]
    assert f"{len(path) + 1} tokens" in caption.inner_text()
    assert page.locator(".round-tree svg").bounding_box()["height"] > 100
