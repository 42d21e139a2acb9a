# Every verb of the project; `make` alone lists them. Only Python (3.10 or newer), a C++20 compiler and CMake are needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell nproc)
CORE   := $(shell find core CMakeLists.txt -type f)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench models asan tsan core-tests fuzz fuzz-guided soak opens packages clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Dependencies first (slow once, then untouched), the package after them (rebuilt whenever the core changes).
$(VENV)/.dependencies: pyproject.toml tools/setup.py tools/needs.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/setup.py
	@touch $@

$(VENV)/.package: $(VENV)/.dependencies $(CORE)
	@echo "building moestream's core"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(VENV)/.package ## make .venv with llama.cpp (built from source, about 6 minutes on 2 cores) and this package

demo: setup ## build the demo model, stream it under a third of its size, compare with stock llama.cpp
	@$(BIN)/python -m moestream.lab.demo

test: setup core-tests ## run all tests
	$(BIN)/python -m pytest

core-tests: ## build and run the core's own tests
	cmake -S . -B build/core-tests -DMOESTREAM_CORE_TESTS=ON
	cmake --build build/core-tests -j $(JOBS)
	ctest --test-dir build/core-tests -j $(JOBS) --output-on-failure

check: setup ## format, lint, types, imports, sizes, changelog and version
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/stubs.py --check
	$(BIN)/python tools/check_tree.py

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools

bench: setup ## the speed table of the README (about 15 minutes)
	$(BIN)/python -m moestream.lab.bench

models: setup ## docs/models.md: every architecture and type, compared with stock (about 3 minutes)
	$(BIN)/python -m moestream.lab.models docs/models.md

fuzz: setup ## read 100,000 models with wrong headers, load 5,000 (half an hour)
	$(BIN)/python tools/fuzz_header.py
	$(BIN)/python tools/fuzz_header.py --load --cases 5000

fuzz-guided: setup ## wrong headers that lead where none led before, for SECONDS (300); needs atheris
	$(BIN)/python tools/fuzz_guided.py --seconds $(or $(SECONDS),300)

soak: setup ## random prompts, budgets and cancels against stock for MINUTES (120)
	$(BIN)/python tools/soak.py --minutes $(or $(MINUTES),120)

opens: setup ## open and close a model CYCLES (10000) times: nothing may stay behind
	$(BIN)/python tools/opens.py --cycles $(or $(CYCLES),10000)

packages: setup ## sdist and wheels, each tried in a fresh environment (PYTHONS=, COMPILERS=; minutes each)
	$(BIN)/python tools/packages.py

asan: ## the core's tests under AddressSanitizer
	cmake -S . -B build/asan -DMOESTREAM_CORE_TESTS=ON -DMOESTREAM_SANITIZE=address
	cmake --build build/asan -j $(JOBS)
	ctest --test-dir build/asan -j $(JOBS) --output-on-failure

tsan: ## the core's tests under ThreadSanitizer
	cmake -S . -B build/tsan -DMOESTREAM_CORE_TESTS=ON -DMOESTREAM_SANITIZE=thread
	cmake --build build/tsan -j $(JOBS)
	ctest --test-dir build/tsan -j $(JOBS) --output-on-failure

clean: ## remove what was built (the demo model stays in the user's cache directory)
	rm -rf build $(VENV)
