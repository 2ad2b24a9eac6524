# `make demo`: install and generate text with the demo model inside the package.
# `make test`: install with the development tools, then every check. Needs Python >= 3.11, pip and git; nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python scripts/install.py
# pip would compile 17,000 files one by one; this takes every core, and leaves out half of the code, of which few files are ever imported.
# A few are templates, which no Python can compile. What is there is compiled while the development tools are added.
SELDOM := transformers/models/|/sympy/|/networkx/|torch/(_inductor|testing|distributed|ao|onnx)/|/pip/|/mypyc?/|/torchgen/|/tests/|/setuptools/
SELDOM := $(SELDOM)|numpy/(distutils|f2py|ma|polynomial)/|pygments/lexers/|/graphql/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true

.PHONY: demo test test-thorough lint figures memory-table vllm-table docs clean
.DEFAULT_GOAL := demo

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagerunner needs Python 3.11 or newer; set PYTHON=")'
	@echo 'Setting up $(VENV) (about a minute) ...'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo 'Adding the development tools to $(VENV) ...'
	@$(COMPILE) & $(INSTALL) --no-build-isolation --editable '.[dev]'; status=$$?; wait; exit $$status
	@$(COMPILE)
	@touch $@

demo: $(VENV)/.base
	PYTHONDONTWRITEBYTECODE= $(BIN)/pagerunner generate

# On a busy machine mypy's workers may start too late for it, which ends it with 2. One process alone needs none.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 4 || { status=$$?; test $$status = 2 && $(BIN)/mypy || exit $$status; }

# A process for each core and one more, because tests also wait (8 at most), whole files at a time (JOBS=1 for one): the longest first, and in the
# first process those that wait (tests/conftest.py). They are forked from one that has collected the tests (tests/helpers/forks.py). One thread in
# each: the models are tiny, and on a busy machine threads that wait for each other take most of the time. Bytecode is kept, whatever the
# environment says: else every process that a test starts compiles the package again, and pytest each test. The day chooses cases and all that is
# random, the order of sets of strings too.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
PAGERUNNER_TEST_DAY ?= $(shell $(PYTHON) -c 'import datetime as time; print(time.datetime.now(time.timezone.utc).toordinal())')
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=$(PAGERUNNER_TEST_DAY) PAGERUNNER_TEST_DAY=$(PAGERUNNER_TEST_DAY) \
		$(BIN)/python -m pytest --forks $(JOBS)

# Every combination of parameters and many more random cases, where `make test` tries each value (tests/helpers/effort.py).
test-thorough:
	PAGERUNNER_THOROUGH=1 $(MAKE) test

figures: $(VENV)/.dev
	$(BIN)/python scripts/draw_figures.py
	$(BIN)/python scripts/draw_processes.py

# Prints the tables of docs/memory.md, and writes the table of docs/models-and-formats.md.
memory-table: $(VENV)/.dev
	$(BIN)/python scripts/memory_table.py
	$(BIN)/python scripts/model_table.py

# The flag tables of docs/coming-from-vllm.md, from the code.
vllm-table: $(VENV)/.dev
	$(BIN)/python scripts/vllm_table.py

# The reference as a static site in build/reference, from the docstrings; no network is used.
docs: $(VENV)/.dev
	$(BIN)/python scripts/reference.py build/reference

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
