# Every target sets up what it needs in .venv and can be run on a bare machine.
PYTHON ?= python3
BIN := .venv/bin
# On machines without a CUDA build at hand this line installs the CPU build.
TORCH := torch==2.13.0
APT_BROWSER := apt-get install --quiet --yes --no-install-recommends chromium-headless-shell fonts-dejavu-core

.PHONY: demo test lint docs test-docs browser bench bench-tiny clean

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

# Looks at the built pages in a browser: CHROMIUM=PATH, or else Playwright's or one of the machine's.
test-docs: .venv/.test-docs $(if $(CHROMIUM),,browser)
	$(BIN)/pytest tests/site --chromium $(CHROMIUM) -rs

# Where there is none, Playwright's is downloaded, or Debian's is installed.
browser: .venv/.test-docs
	$(BIN)/python tests/browsers.py || $(BIN)/playwright install chromium || (apt-get update --quiet && $(APT_BROWSER))

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
	touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache
