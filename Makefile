# Everything runs from one virtual environment, made once and reused until pyproject.toml changes.
# Python is always started with -P: without it the repository's own kernels/ folder would stand for
# any top-level package of that name.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python -P
# Python compiles what it imports; pip would compile all of torch.
PIP := $(VENV)/bin/pip install --disable-pip-version-check --no-compile -q -q
FOLDERS := coordinator prefill decode connector runtime kernels launch
SOURCES := $(FOLDERS) tests tools benchmarks
PYTEST := $(PY) -m pytest

export PYTHONSAFEPATH := 1

.PHONY: help demo test soak check lint types fast-tests bench accuracy accuracy-table clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   serve the embedded model with 1 prefill and 1 decode process and ask it three questions"
	@echo "make test   the test suite, without what is too long for every run"
	@echo "make soak   the whole test suite"
	@echo "make check  formatting, lint, types and the fast tests"
	@echo "make lint   formatting and lint alone;  make types  the type checker alone"
	@echo "make bench  throughput and memory, next to a plain Hugging Face style loop"
	@echo "make accuracy  exact answers of the embedded model at three exit thresholds"
	@echo "make accuracy-table  docs/accuracy.md and its plot, made anew"
	@echo "make clean  remove the virtual environment and every cache"

$(VENV)/.engine: pyproject.toml
	@echo "installing rlt and what its workers need into $(VENV) (once)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[engine]"
	@touch $@

$(VENV)/.test: pyproject.toml
	@echo "installing rlt and what its tests need into $(VENV) (once)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[test]"
	@touch $(VENV)/.engine $@

demo: $(VENV)/.engine
	@$(PY) -m rlt.launch.demo

test: $(VENV)/.test
	$(PYTEST) -m "not soak"

soak: $(VENV)/.test
	$(PYTEST)

check: lint types fast-tests

fast-tests: $(VENV)/.test
	$(PYTEST) -m "not soak and not system and not gpu"

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)

# mypy sees the packages through links, because the folders stand at the repository's root.
types: $(VENV)/.test
	@rm -rf .types && mkdir -p .types/rlt
	@for folder in $(FOLDERS); do ln -s ../../$$folder .types/rlt/$$folder; done
	MYPYPATH=.types $(VENV)/bin/mypy --strict --namespace-packages --explicit-package-bases -p rlt

bench: $(VENV)/.test
	$(PY) benchmarks/decode_speed.py
	$(PY) benchmarks/modes.py
	$(PY) benchmarks/memory.py

# The tools import each other, so they are the one thing that is started without -P.
accuracy: $(VENV)/.engine
	@env -u PYTHONSAFEPATH $(VENV)/bin/python tools/accuracy.py --threshold 1.0 0.9 0.7 --min-loops 1

accuracy-table: $(VENV)/.engine
	@env -u PYTHONSAFEPATH $(VENV)/bin/python tools/accuracy_table.py

clean:
	rm -rf $(VENV) .types .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist rlt.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
