# Two commands do nearly everything: `make sweep` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: sweep test types every-test test-deep test-range gpu-gate gpu-runs lint clean

sweep: $(VENV)/installed  ## Run the smoke sweep; writes HTML and CSV, prints their paths and how to activate the environment
	$(BIN)/leanbench sweep smoke
	@echo 'To use leanbench in this shell, run:  . $(BIN)/activate'

test: $(VENV)/installed-dev  ## Lint, type-check and run every test that can run on this machine
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/imports.py
	$(MAKE) --no-print-directory -j2 types every-test

# Two parts of `make test` that run beside each other.
types:
	$(BIN)/pyright

every-test:
	$(BIN)/pytest -n auto --dist worksteal

test-deep: $(VENV)/installed-dev  ## All examples of property tests, every build and every drill; half an hour
	LEANBENCH_TESTS=deep $(BIN)/pytest -n auto --dist worksteal

test-range: $(VENV)/installed-dev  ## The oldest libraries that pyproject.toml allows, and the newest Triton, beside the torch of .venv
	$(BIN)/python .ci/range.py

gpu-gate: $(VENV)/installed-dev  ## On a GPU: checks, fuzz, sanitizers, mutations and so on; PART=check one of them, OUT= a folder for the logs
	$(BIN)/python tests/gate/gpu_gate.py $(PART) --out $(or $(OUT),runs/gate) $(if $(SEED),--seed $(SEED))

gpu-runs: $(VENV)/installed-dev  ## On a GPU: published runs of older kernels again, RUNS= others; OUT= a folder, SEED= for drawn ones
	$(BIN)/python tests/gate/gpu_runs.py $(RUNS) --out $(or $(OUT),runs/again) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v; sys.exit(0 if ok else "leanbench needs Python 3.11 or newer, this is %d.%d: run `make PYTHON=python3.12 ...`" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(wildcard leanbench/attention/fast*.[ch]) | $(BIN)/python
	@echo 'Installing leanbench with torch and Triton into $(VENV), once: minutes, and GBs where CUDA comes along.'
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo 'Installing what the tests need into $(VENV), once: pytest, hypothesis, ruff, pyright, import-linter.'
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist runs leanbench/attention/_fast.abi3.so
