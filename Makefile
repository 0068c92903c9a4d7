# Two commands: `make quickstart` runs the main job on a real model, `make test` runs every check.
# Both need only make, python3 (3.11 to 3.13) and a package registry. `make PYTHON=python3.12 test` picks another one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINOR := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/py$(MINOR).txt
PIP := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help install quickstart test lint format layers types docs newest reference pytest pins clean distclean

help:
	@echo "make quickstart   load, shard, fit, generate and save a real model on 8 simulated devices"
	@echo "make test         lint, layers, types, docs, newest, reference, pytest: every check"
	@echo "make format       rewrite the code in the project's format"
	@echo "make newest       a named part of the tests on the newest JAX, where a newer Python is found"
	@echo "make reference    install torch and transformers for the live comparisons, where that is cheap"
	@echo "make pins         resolve constraints/ again for this Python"
	@echo "make clean        remove caches and built docs (distclean: the environments too)"

# Each install step leaves a stamp, so a second run does nothing until pyproject.toml or the pins change.
# A virtual environment of another Python minor is replaced.
$(VENV)/.python$(MINOR):
	@test -f $(CONSTRAINTS) || { echo "dew runs on Python 3.11 to 3.13, $(PYTHON) is '$(MINOR)'. Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python$(MINOR) pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable ".[gguf]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable ".[gguf,test,docs]"
	@touch $@

install: $(VENV)/.installed-test

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

test: lint layers types docs newest reference pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

layers: $(VENV)/.installed-test
	$(BIN)/lint-imports --cache-dir .cache/import-linter

types: $(VENV)/.installed-test
	$(BIN)/mypy

docs: $(VENV)/.installed-test
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Prints the reason and succeeds where no newer interpreter can be found.
newest: $(VENV)/.installed-test
	$(BIN)/python tools/newest.py

# Prints the reason and succeeds where torch would bring gigabytes of accelerator libraries, or is not served.
reference: $(VENV)/.installed-test
	$(BIN)/python tools/reference.py

# One worker per core, each with its own eight simulated devices; PYTEST_ARGS replaces the arguments.
PYTEST_ARGS ?= --numprocesses auto --maxprocesses 8 --dist worksteal
pytest: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

pins: $(VENV)/.python$(MINOR)
	$(BIN)/python tools/pin.py

clean:
	rm -rf docs/_build .cache build dist
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-newest
