# Duet's commands. `make setup` makes .venv/ from the lock file; every other target does so by itself when it must.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EDITABLE := $(VENV)/.editable
UV_COMPILE := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --quiet --custom-compile-command 'make lock'

.PHONY: help setup quickstart test test-all test-used fuzz mutants lint format bench gpu gpu-bundle docs lock clean
.DELETE_ON_ERROR:

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(EDITABLE) ## Make the environment in .venv/ (about 6 GB: the registry's torch brings CUDA along)

# Remade when a lock file changes. The stamp comes last, so that an interrupted installation is taken up again.
$(STAMP): requirements.lock requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; run: make PYTHON=/path/to/python3.11 $(or $(MAKECMDGOALS),setup)" >&2; exit 2; }
	@echo "[1 of 3] making the environment $(VENV)/: a few seconds"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2 of 3] fetching $(PACKAGES) packages: on Linux about 3 GB, minutes to half an hour as the network allows"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.lock | $(SHOW_PIP)
	@touch $@

# The command `duet`, and `import duetgan` in any folder: the environment's own setuptools does it, without a network.
$(EDITABLE): $(STAMP) pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-build-isolation --editable .
	@touch $@

PACKAGES = $$(grep -c '^[a-z]' requirements-dev.lock)

# What pip does, a line a package with its number, and the size of what is large; its errors are printed as they are.
define SHOW_PIP
{ n=0; while IFS= read -r line; do case "$$line" in \
	Collecting*) n=$$((n + 1)); echo "  package $$n of about $(PACKAGES): $$(cut -d' ' -f2 <<<"$$line")";; \
	"Requirement already satisfied"*) n=$$((n + 1));; \
	*Downloading*MB*) echo "   $${line##*Downloading}";; \
	"Installing collected packages"*) echo "[3 of 3] installing them, 6 GB on Linux: one to five minutes";; \
	"Successfully installed"*) echo "done: $(VENV)/ is ready";; \
	esac; done; }
endef

quickstart: $(EDITABLE) ## Train and evaluate both models in a quarter of an hour: on the sample, or DATA=FOLDER (MINUTES=N)
	$(BIN)/python quickstart.py $(if $(DATA),"$(DATA)") $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(WEIGHTS),--weights "$(WEIGHTS)")

# TESTS: pytest-xdist's processes; the tests of a file run in one of them, after one another. A third of their time they
# wait for runs that start, sleep or are to be killed: one more than there are cores. In the order of their names the
# long files come early, and the short ones of training and utils fill up the end.
TESTS ?= $(shell python3 -c "import os; print((os.cpu_count() or 1) + 1)")
# Bytecode is kept, whatever the environment says: a hundred processes of the tests would compile the same files.
BYTECODE = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$(CURDIR)/build/pycache"
PYTEST = $(BYTECODE) $(BIN)/python -m pytest -n $(TESTS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## The fast tests
	$(PYTEST) -m "not slow"

test-all: $(STAMP) ## All tests, the slow ones too
	$(PYTEST)

test-used: $(STAMP) ## The tests that start scripts, in a clone of the last commit that is in use: .ci/used
	VENV="$(VENV)" TESTS="$(TESTS)" .ci/used

fuzz: $(STAMP) ## Try mutated files for MINUTES=60 (FIRST=1000, the seed to begin with); cases that fail: build/fuzz/
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),60) --first $(or $(FIRST),1000)

mutants: $(STAMP) ## Plant N=100 small faults (SEED=1, ONLY="training models") and print those that no fast test notices
	$(BIN)/python -m tests.mutation --n $(or $(N),100) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY))

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## Sort imports and apply ruff's safe fixes
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Every benchmark; each prints its ratios as JSON
	@set -e; for script in benchmarks/[a-z]*.py; do \
		echo "== $$script"; $(BIN)/python $$script --json; done

# where there is no .venv/, with the machine's own Python and what the bundle carries: no network is asked
gpu: ## On a machine with GPUs: tests, waits, speed, CIFAR-10, NCCL (ONLY="waits presets"), into build/gpu/
	$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY))

gpu-bundle: $(STAMP) ## Fill build/gpu-bundle/ for it (HAS=FILE its pip list, PY=3.12, CIFAR10=FOLDER, PEERS=FOLDER, LIMIT=60)
	$(BIN)/python -m benchmarks.gpu.bundle $(if $(HAS),--has "$(HAS)") $(if $(PY),--py $(PY)) \
		$(if $(CIFAR10),--cifar10 "$(CIFAR10)") $(if $(PEERS),--peers "$(PEERS)") $(if $(LIMIT),--limit $(LIMIT))

docs: $(STAMP) ## The documentation as a site: build/site/index.html
	$(BIN)/python docs/hooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

lock: $(STAMP) ## Resolve the dependencies of pyproject.toml anew and write the lock files
	$(UV_COMPILE) --upgrade --extra explore --output-file requirements.lock
	$(UV_COMPILE) --upgrade --extra dev --constraint requirements.lock --output-file requirements-dev.lock

clean: ## Remove caches and build outputs; runs/ and .venv/ stay
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
