"""Every page, in light and in dark: whole, and readable on a desk and on a phone. `make test-docs` runs this."""

from pathlib import Path
from urllib.parse import urldefrag

import pytest
from browsers import windows

LOOK = (Path(__file__).parent / "look.js").read_text()
WIDTHS = {"desk": 1280, "phone": 390}
SCHEMES = ("light", "dark")
# Text below this is not read, in CSS pixels.
SMALLEST_TEXT = 11


@pytest.fixture(scope="module")
def seen(site, browser):
    """What is seen of each page: by scheme, device and address. Nothing may go wrong while looking."""
    found = {}
    with windows(site, browser) as new:
        for scheme in SCHEMES:
            page = new(1280, color_scheme=scheme)
            for place in site.pages():
                for device, width in WIDTHS.items():
                    page.set_viewport_size({"width": width, "height": 900})
                    # Loaded wide, and narrowed: the theme's drawer moves while a window widens.
                    if device == "desk":
                        page.goto(place)
                    found[scheme, device, place] = page.evaluate(LOOK)
    assert len(found) > 25 * len(SCHEMES) * len(WIDTHS)
    return found


def faults(seen, of) -> list[tuple]:
    return [(*where, fault) for where, page in seen.items() for fault in of(page)]


@pytest.mark.parametrize("device", WIDTHS)
def test_nothing_stands_out_of_the_window_or_is_cut_off(seen, device):
    here = {where: page for where, page in seen.items() if where[1] == device}
    assert not [where for where, page in here.items() if page["width"] > WIDTHS[device]]
    assert not faults(here, lambda page: page["stands_out"] + page["cut_off"])


def test_text_is_large_enough(seen):
    assert not [(where, page["smallest_text"]) for where, page in seen.items() if (page["smallest_text"] or 99) < SMALLEST_TEXT]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_off_its_background(seen, scheme):
    assert not faults({where: page for where, page in seen.items() if where[0] == scheme}, lambda page: page["faint"])


def test_pictures_are_there_in_the_colours_of_the_page_and_say_what_they_show(seen):
    shown = [(scheme, picture) for (scheme, *_), page in seen.items() for picture in page["pictures"]]
    assert len(shown) > 40
    assert not [picture for _, picture in shown if picture["width"] == 0 or len(picture["says"]) < 15]
    assert not [(scheme, picture) for scheme, picture in shown if f"-{scheme}.svg" not in picture["source"]]


def test_every_page_has_one_title(seen):
    assert not [(where, page["titles"]) for where, page in seen.items() if len(page["titles"]) != 1]


def test_links_and_anchors_lead_somewhere(site, seen):
    pages = {place: page for (scheme, device, place), page in seen.items() if (scheme, device) == ("light", "desk")}
    broken = []
    for place, page in pages.items():
        for link in page["links"]:
            target, anchor = urldefrag(link)
            if not link.startswith(site.address) or (site.folder / target.removeprefix(site.address)).is_file():
                continue
            if target not in pages or (anchor and anchor not in pages[target]["ids"]):
                broken.append((place, link))
    assert not broken


def test_the_scheme_can_be_switched_by_hand(site, window):
    page = window(1280, color_scheme="light")
    page.goto(site.address)
    picture = page.locator("article img:visible")
    assert "light" in picture.get_attribute("src")
    page.locator("label[title='Switch to dark']").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert "dark" in picture.get_attribute("src")
