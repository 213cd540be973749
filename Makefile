# Set-up is part of every target: a virtual environment in .venv, made anew only when pyproject.toml changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
comma  := ,
# Optional dependencies. Without them their tests are skipped: make test-all EXTRAS=dev,transformers,diffusers,nvcc,s3-tests
CI_HAS := $(if $(filter true,$(CI)),dev$(comma)transformers$(comma)diffusers$(comma)nvcc$(comma)s3-tests)
FOR_TESTS := $(or $(EXTRAS),$(CI_HAS),test)
FOR_ALL   := $(or $(EXTRAS),$(CI_HAS),dev)
# Modules are compiled when they are first imported: that is a third of pip's time, and most are never imported.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# What builds the package is in the environment already.
EDITABLE := $(PIP) --no-build-isolation --editable
# Tests start Python hundreds of times; its modules are compiled once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations=15

.PHONY: demo test test-all test-ck test-cuda docs lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py

# Minutes: every part of the program, without the tests marked slow
test: $(VENV)/.installed-$(FOR_TESTS)
	@$(PYTEST) -m "not slow" $(ARGS)

# Half an hour: everything
test-all: $(VENV)/.installed-$(FOR_ALL)
	@$(PYTEST) $(ARGS)

# Rows of AMD arches, compiled for real: CK_ROOT=path/of/a/CK/checkout make test-ck
test-ck: $(VENV)/.installed-$(FOR_TESTS)$(comma)gfx950
	@$(BIN)/python -m pytest -rs -s tests/ck_rows.py $(ARGS)

# Rows of sm_90, run on a Hopper GPU against the reference and PyTorch, and under compute-sanitizer. The reference runs in
# a dozen processes, whose threads would compete for the cores.
test-cuda: $(VENV)/.installed-$(FOR_TESTS)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n 12 tests/cuda_kernels.py tests/cuda_gemm.py tests/cuda_conv.py tests/cuda_torch.py tests/cuda_streams.py tests/cuda_guard.py tests/cuda_sanitizer.py $(ARGS)

# The site, into site/; a link that leads nowhere is an error
docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo site/index.html

# Style, types, and the phrases that tests/english.yaml keeps out of every text
lint: $(VENV)/.installed-$(FOR_ALL)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest -q tests/test_english.py

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed; choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(PIP) --upgrade pip hatchling editables && touch $@  # a pip of 2023 takes twice as long for all others

$(VENV)/.installed: $(VENV)/.pip pyproject.toml
	@$(EDITABLE) . && touch $@

$(VENV)/.installed-%: $(VENV)/.pip pyproject.toml tests/constraints.txt
	@$(EDITABLE) '.[$*]' --constraint tests/constraints.txt && touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
