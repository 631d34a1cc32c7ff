# `make demo` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VM := $(or $(ROLLMILL_HOME),$(HOME)/.cache/rollmill)/vm
PEERS := .peers
LITELLM := .venv-litellm
SEED ?= 0
RUN ?= runs/demo-$(SEED)

.PHONY: demo test setup setup-vllm test-vllm setup-vm test-vm setup-peers bench-sandbox bench-gateway model test-slow bench-loop clean
.DEFAULT_GOAL := help

help:
	@echo "make demo [SEED=7]   set up, then train the demo model by asynchronous RL (about five minutes on two cores)"
	@echo "make test            set up, then lint, type-check and test"
	@echo "make test-slow       the long tests: ten thousand versions of weights over a store that fails, a training run through a bucket (some minutes)"
	@echo "make test-vllm       the adapter against a real vLLM on this CPU, in an environment of its own (some minutes)"
	@echo "make test-vm         the microvm sandbox in real virtual machines, with QEMU from the distribution's packages (some minutes)"
	@echo "make bench-sandbox   sandboxes beside bubblewrap, crun, runsc, sandlock and SWE-ReX in one run"
	@echo "make bench-gateway   what the gateway adds to a model call, beside LiteLLM's proxy in one run"
	@echo "make model           make models/demo again (DEVICE=cuda: under ten minutes; two CPU cores: about seven hours)"
	@echo "make bench-loop      sync against async on the same tasks with slow tools"

$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Rollmill needs Python 3.11 to 3.13, {sys.executable} is {v.major}.{v.minor}; set PYTHON=python3.12 or similar")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing dependencies into $(VENV) ..."
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m rollmill.weights.warm
	@$(BIN)/python -m rollmill.ops.warm
	@touch $@

setup: $(VENV)/.stamp

demo: setup
	@rm -rf $(RUN)
	@$(BIN)/rollmill train examples/demo.toml --set run.dir=$(RUN) --set run.seed=$(SEED)

test: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

$(VLLM)/.stamp: constraints-vllm.txt scripts/setup_vllm.sh
	@echo "installing vLLM for CPUs into $(VLLM): about 3 minutes and 3.4 GB ..."
	@PYTHON=$(PYTHON) scripts/setup_vllm.sh $(VLLM)
	@touch $@

setup-vllm: $(VLLM)/.stamp

test-vllm: setup setup-vllm
	@$(BIN)/python -m pytest -m vllm tests/adapters

$(VM)/base.json: scripts/setup_vm.sh
	@PYTHON=$(CURDIR)/$(BIN)/python scripts/setup_vm.sh $(VM)

setup-vm: setup $(VM)/base.json

test-vm: setup-vm
	@$(BIN)/python -m pytest -m vm tests/sandbox

$(PEERS)/.stamp: scripts/setup_peers.sh
	@PYTHON=$(PYTHON) scripts/setup_peers.sh $(PEERS)
	@touch $@

setup-peers: $(PEERS)/.stamp

bench-sandbox: setup setup-peers
	@$(BIN)/rollmill sandbox bench --peers $(PEERS)

$(LITELLM)/.stamp: scripts/setup_gateway_peers.sh
	@PYTHON=$(PYTHON) scripts/setup_gateway_peers.sh $(LITELLM)
	@touch $@

bench-gateway: setup $(LITELLM)/.stamp
	@$(BIN)/rollmill bench gateway --peers $(LITELLM)

test-slow: setup
	@$(BIN)/python -m pytest -m slow -s

model: setup
	@PYTHON=$(BIN)/python scripts/make_demo_model.sh

bench-loop: setup
	@$(BIN)/rollmill bench loop

clean:
	rm -rf $(VENV) $(PEERS) $(LITELLM) build dist *.egg-info
