# Every target sets up what it needs; `make` alone lists them. Needed beforehand: make, and python3
# (3.11 or later) with its venv module.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Copies of what the environment was made from: it is made again when the contents differ, not when
# a checkout has merely touched the files.
LOCKED := $(VENV)/made-from.lock
INSTALLED := $(VENV)/made-from.toml

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(INSTALLED) ## Train one model on three islands, with live progress; under 3 minutes
	$(BIN)/diloco run --out runs/demo --preset demo

.PHONY: test
test: $(INSTALLED) ## Run the whole test suite
	$(BIN)/pytest -n 2 --dist loadgroup

.PHONY: image
image: ## Build the container image with this machine's certificates and pip settings
	docker/build

.PHONY: test-compose
test-compose: $(INSTALLED) ## Break the compose file's run on this machine's container engine; 10 minutes
	$(BIN)/pytest -v tests/containers

.PHONY: soak
soak: soak-pushes soak-disk soak-chaos ## Hostile pushes and chaos at length; an hour or so; the logs are kept

.PHONY: soak-pushes
soak-pushes: $(INSTALLED) ## Hostile pushes at length; some 10 minutes
	mkdir -p runs
	$(BIN)/python -m tests.soak > runs/soak.md
	mv runs/soak.md docs/results/soak.md

.PHONY: soak-disk
soak-disk: $(INSTALLED) ## 10,000 rounds, and what they take of the disk; some minutes
	mkdir -p runs
	$(BIN)/python -m tests.soak.bounded > runs/disk.md
	mv runs/disk.md docs/results/disk.md

.PHONY: soak-chaos
soak-chaos: $(INSTALLED) ## Kills, stops and absences at length, judged
	mkdir -p runs
	$(BIN)/diloco chaos --out runs/chaos --server-kills 100 --learner-kills 100 --point-kills 1 \
	  --learner-stops 3 --server-away-s 60 > runs/chaos.md
	mv runs/chaos.md docs/results/chaos.md
	$(BIN)/diloco chaos --out runs/chaos-learners --server-kills 0 --learner-kills 100 \
	  --checkpoint-every-s 10 --compare > runs/chaos-learners.md
	mv runs/chaos-learners.md docs/results/chaos-learners.md

.PHONY: lint
lint: $(INSTALLED) ## Check style, types, layers between rooms, and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/mypy

.PHONY: format
format: $(INSTALLED) ## Format the code and the protos, and mend what can be mended
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

.PHONY: protos
protos: $(INSTALLED) ## Generate protos/gen from the protos
	$(BIN)/python protos/generate.py

.PHONY: hooks
hooks: $(INSTALLED) ## Check each commit before it is made (git hooks through pre-commit)
	$(BIN)/pre-commit install

.PHONY: lock
lock: $(INSTALLED) ## Choose the newest versions that pyproject.toml allows, and lock them
	@export UV_CUSTOM_COMPILE_COMMAND="make lock"
	compile() { # compile LOCK SOURCE...
	  $(BIN)/uv pip compile --quiet --no-config --upgrade --universal --fork-strategy fewest \
	    --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --output-file "$$@"
	}
	compile requirements.lock pyproject.toml --extra dev
	# The image's: what of these it runs on, what an accelerator adds, and what builds it.
	compile docker/locks/cpu.lock pyproject.toml --constraint requirements.lock
	compile docker/locks/cuda.lock pyproject.toml --constraint requirements.lock --extra cuda
	compile docker/locks/tpu.lock pyproject.toml --constraint requirements.lock --extra tpu
	compile docker/locks/build.lock - --constraint requirements.lock <<< hatchling

.PHONY: env
env: $(INSTALLED) ## Create or renew the environment in .venv; a minute or more, by the link

$(LOCKED): requirements.lock
	@if ! cmp --silent $< $@; then
	  echo "Installing the locked versions into $(VENV) (a minute or more, by the link)"
	  $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else
	    "Python 3.11 or later is needed; name one: make env PYTHON=/path/to/python3.11")'
	  $(PYTHON) -m venv $(VENV)
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	  cp $< $@
	fi
	touch $@

$(INSTALLED): pyproject.toml $(LOCKED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --no-index --editable .
	cp $< $@

.PHONY: clean
clean: ## Remove the environment, caches and builds; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
