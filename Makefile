# The one definition of every command. `make help` lists them.
#
# `setup` puts the dependencies into a virtual environment in the user's cache folder (shared by all checkouts
# with the same pins) and makes a thin .venv here on top of it; see tools/environment.py. Once that is done it
# takes a tenth of a second, so every other target depends on it.

PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format notebooks figures lab clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: ## build or find the environment; afterwards .venv/bin/kvlens works
	@$(PYTHON) tools/environment.py

# The labels' own summary is dropped, since inspect prints the same facts; notes and progress stay.
demo: setup ## label three traces with the default model and show what matters
	$(BIN)/kvlens label data/traces/traces.jsonl -m smollm2-135m -o $(DEMO) --limit 3 > /dev/null
	$(BIN)/kvlens inspect $(DEMO) --html $(DEMO)/page.html

# One thread for the tests: most of their models are tiny, and threads that wait for each other are slower than none.
test: lint ## everything: lint, types, import contracts, notebooks, the whole suite
	$(BIN)/python tools/notebooks.py --check
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --nbmake --nbmake-timeout=1200 tests $(wildcard notebooks)

lint: setup ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

notebooks: setup ## make the .ipynb files from the percent files
	$(BIN)/python tools/notebooks.py

figures: setup ## redraw every figure from committed data
	@for script in figures/[0-9]*.py; do [ ! -e "$$script" ] || { echo "$$script"; $(BIN)/python "$$script"; } || exit 1; done

lab: setup ## open JupyterLab on the notebooks
	$(BIN)/python -m jupyter lab --allow-root --notebook-dir=notebooks

clean: ## remove what the commands made here; the shared environment and the models stay
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
