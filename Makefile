# Every target works from a fresh clone with python3, pip and make: it makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch is installed before the rest: a range would take a CUDA build of several GB.
TORCH ?= torch==2.13.0
# One environment per set of dependency files.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

ENGINE_STAMPS := .env-vllm/.ready .env-sglang/.ready

# Heavy imports take minutes when they cannot be cached as bytecode.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-slow test-trainer test-engines test-families chaos check format bench up down clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Make the environment

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,demo,dev]"
	rm -f $(VENV)/.ready-*
	touch $@

demo: $(STAMP)  ## Run the whole pipeline on this machine and watch the reward rise
	$(BIN)/turnfold demo

test: $(STAMP)  ## Run lint, types and the whole default test suite
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)  ## Run the long suites too
	$(BIN)/python -m pytest

test-trainer: $(STAMP)  ## Run the trainer's tests on every driver, torchrun and Ray too
	$(BIN)/python -m pytest tests/trainer

test-engines: $(STAMP) $(ENGINE_STAMPS)  ## Run the tests against a real vLLM and a real SGLang on this CPU
	$(BIN)/python -m pytest -m engines tests/engines

# An environment for each server, 2 to 3 GB: their dependencies contradict each other and ours.
.env-%/.ready: tests/engines/environments/install.sh tests/engines/environments/%/*
	PYTHON=$(PYTHON) $< $* .env-$*
	touch $@

test-families: $(STAMP)  ## Play every chat template beside this checkout and write docs/families.md
	FAMILIES_TABLE=docs/families.md $(BIN)/python -m pytest -m slow tests/history/test_families.py

chaos: $(STAMP)  ## Disturb a pipeline a thousand times and report what held
	mkdir -p build
	TURNFOLD_CHAOS_REPORT=$${TURNFOLD_CHAOS_REPORT:-build/chaos.json} $(BIN)/python -m pytest -s -m slow tests/chaos

check: $(STAMP)  ## Format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## Run the benchmarks; each prints JSON
	for script in benchmarks/*.py benchmarks/log/replay.py benchmarks/log/healer.py benchmarks/log/durability.py benchmarks/stragglers/simulate.py benchmarks/stragglers/scale.py; do $(BIN)/python $$script; done

up:  ## Start the pipeline with Docker Compose
	docker compose up --build

down:  ## Stop it; the log stays in its volume
	docker compose down

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .env-vllm .env-sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
