"""The examples run as a reader would run them, and pages show nothing else."""

import functools
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from jetflow.cli import main

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Every script whose code a page may show.
SCRIPTS = ["examples/quickstart.py", "examples/coming_from_transformers.py"]
SCRIPTS += sorted(f"examples/tutorials/{path.name}" for path in (ROOT / "examples" / "tutorials").glob("*.py"))
# What another processor may change: a tie between two nodes falls the other way, and a round more is needed.
TOLERANCE = 0.15
# Columns of code that fit a window of 1280 pixels beside the navigation.
WIDEST = 102
NUMBER = re.compile(r"\d+\.\d+|\d+")


def run(*arguments: str) -> str:
    out = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return out.stdout


@functools.cache
def printed(script: str) -> list[str]:
    """Runs a script in this process, which has loaded everything already, from the folder that a reader would be in."""
    out = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script])
        runpy.run_path(script, run_name="__main__")
    return [line.rstrip() for line in out.getvalue().splitlines()]


def fences(page: Path) -> list[tuple[str, str]]:
    """Head and content of each fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def section_of(file: str, section: str) -> str:
    """The part of a file that a page includes."""
    return (ROOT / file).read_text().split(f"[start:{section}]\n")[1].split(f"[end:{section}]")[0]


def agree(shown: str, line: str) -> bool:
    """The same words, and numbers that are nearly the same."""
    numbers = [[float(one) for one in NUMBER.findall(text)] for text in (shown, line)]
    if re.sub(r"\s+", " ", NUMBER.sub("#", shown)) != re.sub(r"\s+", " ", NUMBER.sub("#", line)):
        return False
    return all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(*numbers, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_print_what_the_pages_show(script):
    lines = printed(script)
    assert lines, "a script that prints nothing shows nothing"
    for page in PAGES:
        for head, content in fences(page):
            if f'title="python {script}"' in head:
                shown = content.splitlines()
                parts = [lines[place : place + len(shown)] for place in range(len(lines) - len(shown) + 1)]
                assert any(all(map(agree, shown, part)) for part in parts), (page.name, shown, lines)


@pytest.mark.parametrize("script", SCRIPTS[2:])
def test_the_page_of_a_tutorial_shows_all_that_it_prints(script):
    page = ROOT / "docs" / "parts" / f"{Path(script).stem}.md"
    shown = [line for head, content in fences(page) if f'title="python {script}"' in head for line in content.splitlines()]
    assert len(shown) == len(printed(script)), (shown, printed(script))
    assert all(map(agree, shown, printed(script)))


def test_commands_print_what_the_pages_show(monkeypatch, capsys):
    """The output of a command stands below it, under the title "prints"."""
    monkeypatch.chdir(ROOT)
    num_shown = 0
    for page in PAGES:
        for (_, command), (head, content) in pairwise(fences(page)):
            if 'title="prints"' in head:
                program, *arguments = shlex.split(command.replace("\\\n", " "))
                assert program == "jetflow"
                assert main(arguments) == 0
                lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
                shown = content.splitlines()
                assert len(shown) == len(lines), (shown, lines)
                assert all(map(agree, shown, lines)), (shown, lines)
                num_shown += 1
    assert num_shown > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_shown_code_fits_a_desk(page):
    for _, content in fences(page):
        for line in content.splitlines():
            included = re.match(r'--8<-- "(.+?):(.+?)"', line)
            code = section_of(*included.groups()) if included else line
            assert all(len(one) <= WIDEST for one in code.splitlines()), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_pages_show_code_and_output_of_scripts_that_are_run_here(page):
    for head, content in fences(page):
        if head.startswith("python"):
            snippets = re.findall(r'^--8<-- "(.+?):(.+?)"$', content, flags=re.MULTILINE)
            assert len(snippets) == len(content.splitlines()), f"code that is not from a script: {content}"
            for file, section in snippets:
                assert file in SCRIPTS
                assert section_of(file, section)
        if 'title="python ' in head:
            assert re.search(r'title="python (.+?)"', head)[1] in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_part_of_a_tutorial_is_on_a_page(script):
    shown = "".join(page.read_text() for page in PAGES)
    for section in re.findall(r"\[start:(\w+)\]", (ROOT / script).read_text()):
        assert f'"{script}:{section}"' in shown, (script, section)
    assert len((ROOT / script).read_text().splitlines()) < 150


def test_texts_are_those_of_plain_decoding():
    counts = {"scoring": 6, "expanders": 5, "drafters": 4, "acceptors": 2, "budgets": 4}
    for name, count in counts.items():
        lines = [line for line in printed(f"examples/tutorials/{name}.py") if "same text" in line]
        assert len(lines) == count
        assert all(re.search(r"same text(?: as plain)?: True", line) for line in lines), lines


def test_the_recorded_round_is_the_one_in_the_docs(tmp_path):
    run("examples/record_round.py", str(tmp_path / "round.json"))
    made, shown = (json.loads(path.read_text()) for path in (tmp_path / "round.json", ROOT / "docs" / "assets" / "round.json"))
    assert (made["before"], made["accepted"], made["bonus"]) == (shown["before"], shown["accepted"], shown["bonus"])
    assert [node["text"] for node in made["nodes"][:16]] == [node["text"] for node in shown["nodes"][:16]]


def test_readme_shows_the_quickstart():
    code = section_of("examples/quickstart.py", "compose").removesuffix("# --8<-- ")
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


def test_the_tiny_pair_is_trained_from_nothing(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    run("examples/train_tiny.py", "--smoke", "--out", str(out), "--work-dir", str(work))
    assert json.loads((out / "result.json").read_text())["same_as_autoregressive_16"] == "3/3"
    assert {path.name for path in out.iterdir()} == {"target", "head", "heldout.jsonl", "result.json", "README.md"}
