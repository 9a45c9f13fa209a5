# Two commands do everything on a fresh machine with plain python3: `make demo` and `make test`.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-slow test-all lint bench clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "overlord needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "the venv module is missing; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -c 'from overlord.runtimes.warming import warm_everything as warm; warm()'  # compiled once, so that no first run waits for it
	@touch $(READY)

demo: $(READY)
	$(BIN)/overlord demo

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -m "not slow" -n $(JOBS) --dist loadscope

# What takes more than a few seconds: real processes killed at every point, Ray, torchrun with eight ranks, long fuzzing.
# Some of it watches real processes against the clock: what fails beside other tests is run once more alone, and counts then.
SLOW := $(BIN)/python -m pytest -q -m slow
test-slow: $(READY)
	$(SLOW) -n $(JOBS) --dist loadscope --durations=40 || { test $$? -eq 1 && $(SLOW) --last-failed --last-failed-no-failures none; }

test-all: test test-slow

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis overlord-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
