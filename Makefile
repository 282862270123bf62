# `make demo` and `make test` set everything up first; VENV= and PYTHON= choose where and with what.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RFT_TEST_DATA ?= $(if $(wildcard ../shared/data),$(abspath ../shared),)

export RFT_TEST_DATA
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup demo test lint ui clean resolve

setup: $(VENV)/.installed

# torch first: a pinned build that is at hand is kept by everything that follows.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/rft demo $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/dagster definitions validate -w workspace.yaml
	$(BIN)/dg check defs

test: lint
	$(BIN)/python -m pytest $(TEST_ARGS)

ui: setup
	$(BIN)/rft ui

# Do the pins install on the other Pythons? Resolves without installing anything.
resolve: setup
	for v in 3.12 3.13; do $(BIN)/pip install --quiet --dry-run --ignore-installed --target /nonexistent --only-binary=:all: \
	  --python-version $$v --constraint constraints.txt torch && \
	  $(BIN)/pip install --quiet --dry-run --ignore-installed --target /nonexistent --only-binary=:all: \
	  --python-version $$v --constraint constraints.txt $$($(BIN)/python -c "import tomllib; print(*[repr(d) for d in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']])" | tr -d "'") || exit 1; done

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
