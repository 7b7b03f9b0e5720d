"""The built pages, served on this machine, and a browser to look at them."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsers import PATIENCE, Site, find, windows

ROOT = Path(__file__).parents[1]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory, request) -> Iterator[Site]:
    """The pages, built so that a warning is an error."""
    if request.config.getoption("--chromium") is None:
        pytest.skip("needs --chromium: make test-docs")
    folder = tmp_path_factory.mktemp("site")
    # With --quiet no warning would be counted.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.fail(f"the docs do not build: {built.stderr}", pytrace=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()


@pytest.fixture(scope="session")
def browser(site, request):
    from playwright.sync_api import sync_playwright

    try:
        path = request.config.getoption("--chromium") or find()
    except LookupError as error:
        pytest.fail(str(error), pytrace=False)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE)
        yield opened
        opened.close()


@pytest.fixture
def window(site, browser):
    with windows(site, browser) as new:
        yield new
