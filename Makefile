# `make quickstart`, `make example`, `make test`, `make lint`, `make sglang`, `make clean` ...: each makes .venv by itself when it is missing
# or when pyproject.toml changed. Variables: PYTHON=python3.12 (interpreter), TORCH="torch==2.13.0" (what to install first).

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p; done))
TORCH ?= torch==2.13.0
# SGLang servers live in an environment of their own: this one (CPU), or the one ARBORIST_SGLANG_PYTHON names (GPU).
SERVER_VENV  := .venv-sglang
SERVER_PIP   := $(SERVER_VENV)/bin/python -m pip --disable-pip-version-check -q
SERVER_FILES := datamodules/inference/sglang/server
SERVER_STAMP := $(SERVER_VENV)/.installed
SERVER_TORCH ?= torch==2.13.0
ifeq ($(ARBORIST_SKIP_SGLANG)$(ARBORIST_SGLANG_PYTHON),)
TESTED_SERVER := $(SERVER_STAMP)
endif
# Test processes: two more than cores, since tests wait for servers, ranks and other processes half of their time; as many
# as memory holds. $(1): GiB that one takes with the ranks and servers that it keeps.
WORKERS ?=
workers = $(or $(WORKERS),$(shell $(PYTHON) -c 'import os; \
	memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30; \
	print(max(1, min(os.cpu_count() + 2, memory // $(1), 16)))'))
# TRL, for the tests that compare losses with it: on top of the packages of .venv, which it must not change.
TRL_VENV  := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed
# The lowest versions that pyproject.toml declares, with which the tests have to pass; BOUNDS_TORCH as TORCH above.
BOUNDS_VENV  := .venv-bounds
BOUNDS_STAMP := $(BOUNDS_VENV)/.installed
BOUNDS := $(shell sed -nE 's/^ *"(torch|transformers|lightning)>=([0-9.]+)".*/\1==\2/p' pyproject.toml)
BOUNDS_TORCH ?= $(filter torch==%,$(BOUNDS))
# Tests on recorded data find it beside the checkout unless the variable says otherwise.
ifneq ($(wildcard ../shared/data),)
export ARBORIST_DATA ?= $(abspath ../shared/data)
endif
# One thread each for training and generation: threads only wait for each other in a model this small.
SMALL := OMP_NUM_THREADS=1
RUN   := runs/quickstart/$(shell date +%Y-%m-%d_%H-%M-%S)
PIP   := $(PY) -m pip --disable-pip-version-check -q

.PHONY: help quickstart quickstart-vision example test test-all test-bounds lint docs sglang soak trl bench-learning clean

help:
	@echo "make quickstart   train a tiny model in a few minutes (CPU); results in runs/quickstart/<time>/"
	@echo "make quickstart-vision   the same for a model that sees: counting coloured squares; results in runs/vision/<time>/"
	@echo "make example NAME=smollm2 [WITH=lora]   one of examples/: smollm2 and sft_then_grpo train a real model, sweep searches"
	@echo "make test         lint, then the tests (but those that take long: real servers, kills, whole runs many times)"
	@echo "make test-all     lint, then every test"
	@echo "make test-bounds  the tests with the lowest torch, transformers and lightning that pyproject.toml allows"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make docs         the site, in build/site; a link that leads to nothing is an error"
	@echo "make sglang       an environment for SGLang servers on CPU, used by 'arborist serve' and the tests"
	@echo "make soak         every fault at random moments of real runs, ten times each; about half an hour"
	@echo "make trl          an environment with TRL, whose losses the tests compare with (they are skipped without it)"
	@echo "make bench-learning   every algorithm from one warm start, three seeds (about an hour; benchmarks/results/learning)"
	@echo "make clean        remove the environments and caches (runs/ stays)"

# One run directory for both parts: the supervised warm start below it, the reinforcement learning in it.
quickstart: $(STAMP)
	$(SMALL) $(PY) -m app fit --config configs/quickstart_sft.yaml --run_dir $(RUN)/warm_start
	$(SMALL) $(PY) -m app fit --config configs/quickstart.yaml --run_dir $(RUN) --model.model.path $(RUN)/warm_start/model
	@echo "Done: $(RUN)"

# The model is made here; the rest as above.
VISION := runs/vision/$(notdir $(RUN))
quickstart-vision: $(STAMP)
	$(PY) -m examples.vision.make_model $(VISION)/model
	$(SMALL) $(PY) -m app fit --config configs/vision_quickstart_sft.yaml --run_dir $(VISION)/warm_start \
		--model.model.path $(VISION)/model --data.tokenizer $(VISION)/model
	$(SMALL) $(PY) -m app fit --config configs/vision_quickstart.yaml --run_dir $(VISION)/run \
		--model.model.path $(VISION)/warm_start/model --data.tokenizer $(VISION)/warm_start/model
	@echo "Done: $(VISION)/run"

# Its prepare.py fetches model and data; one with an sft.yaml imitates first, into warm_start/ of its run directory.
# `WITH=lora` lays lora.yaml over its grpo.yaml, `ARGS` is for flags of the last `fit`. One with a search.py is a search.
NAME ?= smollm2
EXAMPLE := runs/$(NAME)/$(notdir $(RUN))
SFT := $(wildcard examples/$(NAME)/sft.yaml)
example: $(STAMP)
ifneq ($(wildcard examples/$(NAME)/search.py),)
	$(PY) -m examples.$(NAME).search runs/$(NAME) $(ARGS)
else
	$(PY) -m examples.$(NAME).prepare runs/$(NAME)
	$(if $(SFT),$(SMALL) $(PY) -m app fit --config $(SFT) --run_dir $(EXAMPLE)/warm_start)
	$(SMALL) $(PY) -m app fit $(foreach file,grpo $(WITH),--config examples/$(NAME)/$(file).yaml) \
		--run_dir $(EXAMPLE) $(if $(SFT),--model.model.path $(EXAMPLE)/warm_start/model) $(ARGS)
endif

# One thread: the models are tiny, and the tests that start processes would otherwise fight over the cores. Files stay
# whole: the tests of some share servers; tests/conftest.py says in which order they come.
pytest_files = --numprocesses $(call workers,$(1)) --dist loadfile --no-loadscope-reorder
test test-all test-bounds: export OMP_NUM_THREADS := 1
# Else every process that a test starts compiles the whole project anew, where a machine has this set.
test test-all test-bounds: export PYTHONDONTWRITEBYTECODE :=
test-all: export HYPOTHESIS_PROFILE ?= ci
test: lint $(TESTED_SERVER)
	$(PY) -m pytest $(call pytest_files,5) -m "not slow"

test-all: lint $(TESTED_SERVER)
	$(PY) -m pytest $(call pytest_files,7)

test-bounds: $(BOUNDS_STAMP) $(TESTED_SERVER)
	$(BOUNDS_VENV)/bin/python -m pytest $(call pytest_files,5) -m "not slow"

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "Done: build/site/index.html"

sglang: $(SERVER_STAMP)

soak: $(STAMP) $(TESTED_SERVER)
	$(SMALL) $(PY) -m tests.faults.soak
	$(SMALL) $(PY) -m tests.faults.soak_ranks --out benchmarks/results/faults

trl: $(TRL_STAMP)

bench-learning: $(STAMP)
	$(SMALL) $(PY) -m benchmarks.learning --out benchmarks/results/learning

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# torch goes first, so that TORCH alone decides its build: pip's own choice on Linux may be gigabytes of CUDA packages.
# An environment without pip is one whose making was interrupted: it is made again in its place.
$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "Arborist needs Python 3.11 or newer and found none: install it or say make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Arborist needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (a few minutes the first time)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PIP) install $(TORCH)
	$(PIP) install -e '.[dev]'
	@touch $(STAMP)

$(SERVER_STAMP): $(SERVER_FILES)/requirements.txt $(SERVER_FILES)/wheels.txt
	@echo "Setting up $(SERVER_VENV), about 3 GB (a few minutes, once)"
	@$(SERVER_PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(SERVER_VENV)
	$(SERVER_PIP) install $(SERVER_TORCH)
	$(SERVER_PIP) install -r $(SERVER_FILES)/requirements.txt
	$(SERVER_PIP) install --no-deps -r $(SERVER_FILES)/wheels.txt
	@touch $(SERVER_STAMP)

$(BOUNDS_STAMP): pyproject.toml
	@echo "Setting up $(BOUNDS_VENV) with $(BOUNDS) (gigabytes of CUDA packages, unless BOUNDS_TORCH says otherwise)"
	@$(BOUNDS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(BOUNDS_VENV)
	$(BOUNDS_VENV)/bin/python -m pip --disable-pip-version-check -q install $(BOUNDS_TORCH)
	$(BOUNDS_VENV)/bin/python -m pip --disable-pip-version-check -q install -e '.[dev]' $(filter-out torch==%,$(BOUNDS))
	@touch $(BOUNDS_STAMP)

# A path file lets it see the packages of .venv, so that only what TRL needs beyond them is installed.
$(TRL_STAMP): $(STAMP)
	$(TRL_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv $(TRL_VENV)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(TRL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check -q install 'trl==1.16.0'
	@touch $(TRL_STAMP)

clean:
	rm -rf $(VENV) $(SERVER_VENV) $(TRL_VENV) $(BOUNDS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
