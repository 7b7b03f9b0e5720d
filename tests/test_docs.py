"""The pages and the README say what the repository holds."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from bench.figures import FOLDER, figures

import jetflow

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


def test_figures_are_those_of_the_results():
    made = figures()
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    for name, svg in made.items():
        assert (FOLDER / name).read_text() == svg, f"{name} is not that of the results: python -m bench.figures"


def test_each_figure_is_shown_in_light_and_dark():
    shown = "".join(page.read_text() for page in PAGES)
    for name in figures():
        which = re.search(r"(light|dark)\.svg", name)[1]
        assert f"assets/figures/{name}#only-{which})" in shown


def test_public_names_have_their_place_in_the_api():
    modules = set(re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    for name in jetflow.__all__:
        home = getattr(getattr(jetflow, name), "__module__", None)
        assert home is None or home in modules, (name, home)
    for page in PAGES:
        for place in re.findall(r"\]\[(jetflow[\w.]+)\]", page.read_text()):
            module = next(one for one in sorted(modules, key=len, reverse=True) if place == one or place.startswith(f"{one}."))
            found = import_module(module)
            for part in place.removeprefix(module).split(".")[1:]:
                found = getattr(found, part)


def test_the_page_of_installation_names_every_extra():
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^([\w-]+) = \[", project, flags=re.MULTILINE)) == set(
        re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)
    )


def test_every_answer_links_to_more():
    answers = (ROOT / "docs" / "faq.md").read_text().split("\n### ")[1:]
    assert len(answers) > 25
    assert not [answer.splitlines()[0] for answer in answers if "](" not in answer and "][" not in answer]


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


@pytest.mark.parametrize("name", ["tiny_methods", "tiny_pairwise"])
def test_tables_of_methods_are_those_of_the_results(name):
    from bench.tiny_methods import markdown

    table = markdown(json.loads((ROOT / "results" / f"{name}.json").read_text()))
    assert (ROOT / "results" / f"{name}.md").read_text() == table
    if name == "tiny_methods":
        assert f"<!-- methods -->\n{table}<!-- /methods -->" in (ROOT / "README.md").read_text()
