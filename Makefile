# make demo | test | lint   each sets up .venv first if that has not been done yet

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Where the tests and the doctests are. Some of it: make test TESTS=tests/watch
TESTS ?= laminar plugins/laminar_dask flows tests
# More options of the flow: make demo DEMO_ARGS="--steps 10"
DEMO_ARGS ?=

.PHONY: setup demo test lint format clean

setup: $(STAMP)

# torch goes first and by its exact version: left to resolve it among the rest, pip may take a build of several GB.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ucx]'
	touch $@

demo: $(STAMP)
	$(BIN)/laminar-flow run flows/quickstart.py $(DEMO_ARGS)

# One thread for torch and BLAS: the tests start processes, and more threads than cores only slow each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
