# Every target sets up what it needs in .venv and can be run on a bare machine.
PYTHON ?= python3
BIN := .venv/bin
# On machines without a CUDA build at hand this line installs the CPU build.
TORCH := torch==2.13.0

.PHONY: demo test lint docs test-docs bench bench-tiny clean

demo: .venv/.base
	$(BIN)/jetflow demo

test: .venv/.dev
	$(BIN)/pytest

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

# Looks at the built pages in a browser: Playwright's, where it can be downloaded, else one of the machine's, or CHROMIUM=PATH.
test-docs: .venv/.test-docs
	$(BIN)/pytest tests/test_site.py --chromium $(CHROMIUM) -rs

bench: bench-tiny
	$(BIN)/python -m bench.tree_building

bench-tiny: .venv/.base
	$(BIN)/python -m bench.tiny
	$(BIN)/python -m bench.tiny_methods

.venv/.base: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.dev: .venv/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

.venv/.docs: .venv/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

.venv/.test-docs: .venv/.docs
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test-docs]'
	$(BIN)/playwright install chromium || echo "no browser could be downloaded; one of the machine's is looked for"
	touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache
