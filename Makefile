# One virtual environment, made once; every command sets it up first and then only does its job.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= configs/quickstart.yaml
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help distill probe bench test test-gpu soak lint clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  CONFIG=path picks another recipe, ARGS='--a.b value' overrides its settings"

distill: $(READY)  ## train target, reference and draft; measure, export and report (runs/<name>/)
	$(BIN)/python -m distill --config $(CONFIG) $(ARGS)

probe: $(READY)  ## train acceptance probes for every layer and compare early-exit methods
	$(BIN)/python -m probes --config $(CONFIG) $(ARGS)

bench: $(READY)  ## compare decoding methods and peers on the trained pair
	$(BIN)/python -m decode bench --config $(CONFIG) $(ARGS)

test: $(READY)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

test-gpu: $(READY)  ## run the tests that need a GPU (skipped where there is none)
	$(BIN)/python -m pytest tests/gpu -m gpu -rs $(ARGS)

soak: $(READY)  ## kill a tiny run 20 times, damage its files: it has to end bit by bit the same
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/soak.py $(ARGS)

lint: $(READY)  ## ruff, mypy, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment, the runs and the caches
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("draftsmith needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; give one with make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@echo "setting up $(VENV) (once, about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
