# Every target does its own set-up: a virtual environment in .venv, installed with the exact pins of constraints.txt.
# Another interpreter: make test PYTHON=python3.12

SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# extra arguments: Hydra overrides for quickstart, pytest's own for the tests
ARGS ?=
PYTEST_ARGS ?=
# One thread a process: two ranks with a full thread pool each fight over the same cores. Keep bytecode, since the
# tests start many processes.
ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Each worker starts with half of the files in order and steals from the other when it is done. Tests of a file share
# ranks and networks, so files should stay together.
WORKERS ?= 2
PYTEST := $(ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */\1|/p' Makefile | while IFS='|' read -r name what; do printf '  make %-12s %s\n' "$$name" "$$what"; done

# Compile only what a run imports, a quarter of the packages' files. That saves a minute.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: install
install: $(STAMP)  ## the virtual environment alone

# The stamp comes last, so that an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "PYTHON=$(PYTHON) is not found; Python >= 3.11 is needed: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "PYTHON=$(PYTHON) is $$($(PYTHON) -V 2>&1); Python >= 3.11 is needed: make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	$(ENV) $(BIN)/python -c 'import distill.train.trainer'
	@touch $@

.PHONY: quickstart
# From scratch: what an earlier run left in runs/quickstart moves to runs/quickstart/previous/. Trains with dp_shard=2,
# which is faster on two cores than the recipe's cp=2.
quickstart: $(STAMP)  ## distill the shipped teacher on two CPU processes, from scratch; ends in runs/quickstart/report.html
	$(ENV) $(BIN)/torchrun --standalone --nproc-per-node 2 train.py experiment=quickstart device=cpu \
	  mesh.cp=1 checkpoint.resume=never $(ARGS)

.PHONY: test
test: $(STAMP)  ## the tests to run after each change: 3 minutes on two cores
	$(PYTEST) -m "not slow and not long" $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMP)  ## make test, and a mesh of each kind, all families and strategies: what CI runs, 25 minutes
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

.PHONY: test-triton
test-triton: $(STAMP)  ## the Triton kernels in Triton's interpreter; installs Triton (690 MB)
	$(PIP_INSTALL) -e '.[dev,triton]'
	TRITON_INTERPRET=1 $(PYTEST) tests/distributed/test_triton_dual.py tests/unit/test_sparse_kernels.py $(PYTEST_ARGS)

.PHONY: test-long
test-long: $(STAMP)  ## further meshes and combinations, small runs of benchmarks/, inductor: hours, not in CI
	$(PYTEST) -m long $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP)  ## ruff, the types of fsdp_cp and models by mypy, and the prose of code and documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

# Takes what the indexes offer today for every extra that installs without a GPU. torch stays at the version
# that the project is tested with, without the +cpu that a CPU index adds.
TORCH_VERSION := 2.13.0
EXTRAS := dev,demo,fa4,triton,wandb,tensorboard,bench
.PHONY: constraints
constraints:  ## write constraints.txt from a fresh virtual environment
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --disable-pip-version-check 'torch==$(TORCH_VERSION)' '.[$(EXTRAS)]'
	{ sed -n '/^#/p' constraints.txt; \
	  build/constraints/bin/python -m pip freeze --all --exclude pip --exclude wheel --exclude fsdp-cp | sed 's/+[a-z0-9.]*$$//'; \
	} > build/constraints.new
	mv build/constraints.new constraints.txt
	rm -rf build/constraints

.PHONY: clean
clean:  ## remove caches and build leftovers
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## clean, and remove the virtual environment (runs/ stays)
	rm -rf $(VENV)
