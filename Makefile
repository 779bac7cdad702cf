# The everyday verbs. Everything runs in .venv, which the first verb makes from requirements.lock.
#   PYTHON=python3.12 make run    picks the interpreter of a new .venv (3.11 or later)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export ONCE PEERS

.DEFAULT_GOAL := help
.PHONY: help install models run demo cluster test test-slow test-cluster test-cluster-slow check format bench bench-operator protos crds lock clean

help: ## Shows this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Makes .venv from the lock; every other verb does it, too

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is too old, 3.11 or later is needed (set PYTHON)" >&2; exit 1; }
	@echo "installing into $(VENV); torch alone is several hundred megabytes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --constraint requirements.lock --editable '.[operator,server,dev]'
	@touch $@

models: $(INSTALLED) ## Prepares the demo's target model and its draft head in .cache
	@$(BIN)/python server/demo/prepare_models.py

run: $(INSTALLED) ## Starts a server, streams two completions, measures; ONCE=1 stops after that
	@$(BIN)/python server/demo/run.py

demo: $(INSTALLED) models ## The whole product on a Kubernetes of its own, on this machine; ONCE=1 ends after the proof
	@$(BIN)/python operator/demo/run.py

cluster: $(INSTALLED) ## Starts the tests' Kubernetes for a person, until Ctrl-C
	@PYTHONPATH=tests $(BIN)/python -m support.kube up --image operator --image server

test: $(INSTALLED) ## Runs the tests
	@$(BIN)/python -m pytest -m "not slow and not gpu and not bench and not cluster"

test-slow: $(INSTALLED) models ## Runs the slower tests
	@$(BIN)/python -m pytest -m "slow and not gpu and not bench and not cluster" --numprocesses 2

test-cluster: $(INSTALLED) models ## Runs the tests on a real Kubernetes, which is built and started here
	@$(BIN)/python -m pytest -m "cluster and not slow" tests/cluster

test-cluster-slow: $(INSTALLED) models ## Runs the slower of them
	@$(BIN)/python -m pytest -m "cluster and slow" tests/cluster

check: $(INSTALLED) ## Format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/mypy server/demo operator/demo .ci/lock.py crds/generate.py helm/generate_crds.py
	$(BIN)/lint-imports

format: $(INSTALLED) ## Formats the code and fixes what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) models ## Measures against transformers; PEERS=1 adds vLLM and llama.cpp
	@$(BIN)/python tests/bench/run.py

bench-operator: $(INSTALLED) ## Measures the operator with 200 resources on a control plane of its own (root, Linux)
	@$(BIN)/python tests/bench/operator_bench.py

protos: $(INSTALLED) ## Generates the stubs of protos/
	PYTHON="$(abspath $(BIN))/python" protos/generate.sh

crds: $(INSTALLED) ## Generates the CRD and the chart's copy
	$(BIN)/python crds/generate.py
	$(BIN)/python helm/generate_crds.py

lock: $(INSTALLED) ## Resolves requirements.lock again for new or removed dependencies
	$(BIN)/python .ci/lock.py

clean: ## Removes .venv, .cache and what tools left behind
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find operator server protos tests -name __pycache__ -type d -prune -exec rm -rf {} +
