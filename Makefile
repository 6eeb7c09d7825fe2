# Two commands do everything, each with its own set-up: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow lint size mutants

help:
	@echo "make quickstart   install, then train a small GPT with and without sequence length warmup (minutes on a CPU)"
	@echo "make test         install, then run the tests"
	@echo "make test-slow    the slow tests"
	@echo "make lint         ruff (rules and layout) and mypy"
	@echo "make size         tokens and tokens a code line, package by package"
	@echo "make mutants SEED=0123abcd   how many seeded one-line bugs the fast tests catch (a quarter of an hour)"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "efftrain needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (PyTorch takes a minute or more) ..."
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e ".[dev,eval]"
	@touch $@

quickstart: install
	@$(BIN)/efftrain sweep quickstart quickstart-slw --seeds 1234
	@$(BIN)/efftrain sample quickstart-seed1234 --prompt "    def __init__(self"

test: install
	@$(BIN)/python -m pytest -q -n 2

test-slow: install
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "slow and not gpu"

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

size: install
	@$(BIN)/python -m tests.laws.test_size

mutants: install
	@$(PIP_INSTALL) -e ".[mutants]"
	@$(BIN)/python -m tests.mutants --seed $(SEED)
