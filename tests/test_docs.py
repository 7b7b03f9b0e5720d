"""The pages and the README say what the repository holds."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_own_parts_write_the_text_of_plain_decoding():
    out = subprocess.run([sys.executable, "examples/own_parts.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("8 of 8") == 4


def test_snippets_exist():
    found = 0
    for page in PAGES:
        for file, section in re.findall(r'--8<-- "(.+?):(.+?)"', page.read_text()):
            code = (ROOT / file).read_text()
            assert f"[start:{section}]" in code, (page.name, section)
            assert f"[end:{section}]" in code, (page.name, section)
            found += 1
    assert found >= 9


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


def test_links_of_the_readme_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text()):
            assert (ROOT / link).exists(), (name, link)


def test_the_benchmark_rewrites_only_its_own_part_of_the_readme(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.tiny import with_table

    row = {"name": "a method", "tau": 2.5, "tokens_per_second": 10.0, "speedup": 1.5, "texts_equal": 3, "num_prompts": 3}
    report = {
        "results": [row],
        "settings": {"num_prompts": 3, "repeats": 1},
        "threads": 2,
        "machine": "here",
        "versions": {"torch": "2", "transformers": "5"},
    }
    readme = (ROOT / "README.md").read_text()
    (before, _), (after_before, after) = (text.split("<!-- results -->") for text in (readme, with_table(readme, report)))
    assert after_before == before
    assert after.split("<!-- /results -->")[1] == readme.split("<!-- /results -->")[1]
    assert "| a method | 2.50 | 10 | 1.50x | 3 of 3 |" in after
