# Set-up is part of every target: a virtual environment in .venv, made anew only when pyproject.toml changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch is the second opinion on numerics. CI has it always; elsewhere: make test EXTRAS=dev,torch
EXTRAS ?= $(if $(filter true,$(CI)),dev$(comma)torch,dev)
comma  := ,

.PHONY: demo test test-ck test-cuda docs lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-$(EXTRAS)
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# Rows of AMD arches, compiled for real: CK_ROOT=path/of/a/CK/checkout make test-ck
test-ck: $(VENV)/.installed-$(EXTRAS)$(comma)gfx950
	@$(BIN)/python -m pytest -rs -s tests/ck_rows.py $(ARGS)

# Rows of sm_90, run on a Hopper GPU against the reference and PyTorch, and under compute-sanitizer
test-cuda: $(VENV)/.installed-$(EXTRAS)
	@$(BIN)/python -m pytest -rs -n 8 tests/cuda_kernels.py tests/cuda_streams.py tests/cuda_sanitizer.py $(ARGS)

# The site, into site/; a link that leads nowhere is an error
docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo site/index.html

lint: $(VENV)/.installed-$(EXTRAS)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed; choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . && touch $@

$(VENV)/.installed-%: $(VENV)/.python pyproject.toml tests/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt --editable '.[$*]' && touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
