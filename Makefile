# Each target does its own set-up on a machine that has only Python 3.10 or newer, pip, git and make.
# Packages come from whatever index pip is set to. A second run finds its stamps and is quick.

# Python 3.11 where there is one, as in CI; else the python3 at hand. `make test PYTHON=...` to choose.
PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Named exactly, and installed first: see "deps" in tox.ini.
TORCH := torch==2.13.0
# The tox environments of the Python at hand: py311, py311-rest and so on for Python 3.11.
PY_ENV ?= $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
# For example: make demo DEMO_ARGS="--ranks 4 --out pictures"
DEMO_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all docs dev clean

help:
	@echo "make demo      run a trained diffusion transformer, streamed over 2 ranks, with proof"
	@echo "make test      lint, types, tests against the wheel, some of them on the core alone, docs"
	@echo "make test-all  the same, then the slow tests, all on the core alone, the zoo, every parallelism"
	@echo "make docs      build the documentation into site/"
	@echo "make dev       put every tool of a contributor into .venv, and the pre-commit hooks"
	@echo "make clean     delete what these targets made"

demo: $(VENV)/.dlo
	$(BIN)/dlo demo $(DEMO_ARGS)

# The longest first: the others fill the place that is free before the end.
test: $(VENV)/.tox
	$(BIN)/tox run-parallel --parallel 2 --parallel-live --parallel-no-spinner \
		-e $(PY_ENV)-rest,$(PY_ENV)-ranks,core-only,types,lint,docs

test-all: test
	$(BIN)/tox run-parallel --parallel 2 --parallel-live --parallel-no-spinner \
		-e $(PY_ENV)-slow,$(PY_ENV)-orders,core-only-all,zoo,parallel,serve

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict
	@echo "==> open site/index.html"

dev: $(VENV)/.dlo $(VENV)/.dev
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) .venv-boot .tox site build dist \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis digits.png timeline.png

# Some systems split ensurepip off Python; then virtualenv, which brings its own pip, makes the folder.
$(VENV)/.made:
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit("dlo needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		$(PYTHON) -m pip install --quiet --target .venv-boot virtualenv && \
		PYTHONPATH=.venv-boot $(PYTHON) -m virtualenv --quiet $(VENV); }
	$(PIP) install --quiet --upgrade pip
	@touch $@

$(VENV)/.tox: $(VENV)/.made pyproject.toml
	@echo "==> installing tox into $(VENV)"
	$(PIP) install --quiet "tox>=4.24"
	@touch $@

$(VENV)/.dlo: $(VENV)/.made pyproject.toml
	@echo "==> installing $(TORCH), then dlo from this folder, into $(VENV)"
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --editable ".[plot]"
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	@echo "==> installing the documentation tools into $(VENV)"
	$(PIP) install --quiet --group docs
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	@echo "==> installing the contributor's tools into $(VENV)"
	$(PIP) install --quiet --group dev
	@touch $@
