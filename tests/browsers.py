"""Browsers and windows to look at the docs with. `python tests/browsers.py` exits with 1 where there is no browser."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
# Milliseconds: a busy machine is slow, not wrong.
PATIENCE = 120_000


class Site(NamedTuple):
    """Where the built pages are, on disk and in a browser."""

    folder: Path
    address: str

    def pages(self) -> list[str]:
        """Addresses of all pages, the one for wrong addresses included."""
        pages = sorted(path.relative_to(self.folder) for path in self.folder.rglob("index.html"))
        return [self.address + str(path).removesuffix("index.html") for path in pages] + [f"{self.address}404.html"]


def find() -> str | None:
    """Finds a browser: None stands for Playwright's own, which goes first, a path for one of the machine's.

    Raises:
        LookupError: There is neither.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        if Path(playwright.chromium.executable_path).exists():
            return None
    for path in filter(None, map(shutil.which, NAMES)):
        return path
    raise LookupError(f"no browser: playwright install chromium, or one of {', '.join(NAMES)}, or --chromium PATH")


@contextmanager
def windows(site: Site, browser) -> Iterator[Callable]:
    """Opens windows of a width; at the end nothing may have gone wrong in any of them."""
    wrong: list[str] = []
    opened = []

    def new(width: int, **settings):
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        context.set_default_timeout(PATIENCE)
        opened.append(context)
        page = context.new_page()

        def note(message: str) -> None:
            wrong.append(f"{page.url}: {message}")

        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        # Leaving a page breaks off what it was still loading.
        page.on("requestfailed", lambda one: None if "ABORTED" in one.failure else note(f"{one.failure}: {one.url}"))
        page.on("response", lambda one: note(f"{one.status}: {one.url}") if one.status >= 400 else None)
        own = (site.address, "data:", "blob:")
        page.on("request", lambda one: None if one.url.startswith(own) else note(f"asks for {one.url}"))
        return page

    yield new
    for context in opened:
        context.close()
    assert not wrong


if __name__ == "__main__":
    try:
        print(f"looking with {find() or 'the browser of Playwright'}")
    except LookupError as error:
        sys.exit(str(error))
