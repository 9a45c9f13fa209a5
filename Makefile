# Two commands do everything on a fresh machine with plain python3: `make demo` and `make test`.
PYTHON ?= python3
# More than two cores: many tests wait for clocks and processes.
JOBS ?= 4
SLOW_JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
USABLE := $(VENV)/.usable
READY := $(VENV)/.ready
# The documentation needs its own extra only; an install that has everything has that too.
DOCS := $(or $(wildcard $(READY)),$(VENV)/.docs)
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check
# One line for each package, as it is found, and one when they are unpacked.
SHOWN := | awk '/^(Collecting|Building wheel|Installing)/ { print "  " substr($$0, 1, 100); fflush() }'

.PHONY: setup demo demo-long test test-slow test-trainers test-nightly test-bounds test-all lint docs bench clean

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "overlord needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "the venv module is missing; on Debian: apt-get install python3-venv"; exit 2; }
	@$(PIP) --quiet --upgrade pip

# What runs a job: a tenth of what the tests need.
$(USABLE): pyproject.toml | $(BIN)/python
	@echo "installing what runs a job into $(VENV): about half a minute"
	@$(PIP) -e '.[dashboard]' $(SHOWN)
	@$(BIN)/python -m compileall -q src  # an editable install has no bytecode, and some environments let no process write any
	@echo "compiling the kernels, once for this install, so that no run waits for it: about a minute on a quiet machine"
	@$(BIN)/python -c 'from overlord.runtimes.launching.deployment import warm_everything as warm; warm(lambda what: print(" ", what, flush=True))'
	@touch $(USABLE)

# Everything: the trainers, Ray, linters, the documentation site.
$(READY): $(USABLE)
	@echo "installing torch, Ray, linters and what the tests need: some minutes, gigabytes with CUDA"
	@$(PIP) torch==2.13.0 $(SHOWN)
	@$(PIP) -e '.[dev]' $(SHOWN)
	@touch $(READY)

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "installing what builds the documentation into $(VENV)"
	@$(PIP) -e '.[docs]' $(SHOWN)
	@touch $@

demo: $(USABLE)
	$(BIN)/overlord demo

# The demo's text, trained by four ranks on the CPU that share long sequences.
demo-long: $(READY)
	@test -f overlord-demo/job.yaml || $(BIN)/overlord demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_long.py overlord-demo/job.yaml --steps 10

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

# What fails in parallel on a busy machine runs once more, alone; both runs are shown, and the second counts. A suite that
# cannot be collected ends at once. See tests/run_suite.py.
SUITE := $(BIN)/python -m tests.run_suite -q
# In the order of their files: by size, modules of one long test come last and leave a core idle.
test: lint
	$(SUITE) -m "not slow and not nightly" -n $(JOBS) --dist loadscope --no-loadscope-reorder --durations=30

# What takes more than a few seconds: real processes killed at every point, storms, Ray, torchrun with eight ranks.
# With MINUTES=25, what has not begun by then is skipped, and the suite begins at another module with every commit.
MINUTES ?= 10000
test-slow: $(READY)
	OVERLORD_TESTS_UNTIL=$$(( $$(date +%s) + 60 * $(MINUTES) )) OVERLORD_TESTS_FROM=$$(git rev-parse HEAD) \
		$(SUITE) -m "slow and not nightly" tests -n $(SLOW_JOBS) --dist loadscope --no-loadscope-reorder --durations=20

# What takes minutes each: 20,000 flipped bytes in a file of every format, thousands of fault schedules.
test-nightly: $(READY) test-bounds
	$(BIN)/python -m pytest -q -m nightly tests -n $(JOBS) --dist worksteal --durations=20

# Kernels that raise where an index is outside of its array. Not even numba looks at this variable when it takes a kernel
# from its cache: they have a folder of their own.
test-bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/build/checked-kernels \
		$(BIN)/python -m pytest -q -m "not nightly" tests/planning tests/transforms tests/core -n $(JOBS) --dist loadscope

# torchtitan, DeepSpeed and VeOmni: in a venv that has their versions in front of those of the development install.
TRAINERS := .venv-trainers
$(TRAINERS)/.ready: tests/integrations/trainers.txt $(READY)
	$(BIN)/python -m venv --clear --without-pip $(TRAINERS)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		"$$($(TRAINERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/development.pth"
	DS_BUILD_OPS=0 $(BIN)/python -m pip --python $(TRAINERS)/bin/python install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -r tests/integrations/trainers.txt
	@touch $@

test-trainers: $(TRAINERS)/.ready
	$(TRAINERS)/bin/python -m pytest -q --durations=5 \
		tests/integrations/test_torchtitan.py tests/integrations/test_deepspeed.py tests/integrations/test_veomni.py

test-all: test test-slow test-trainers test-nightly

# The site, into build/docs: open build/docs/index.html, no server and no network needed. A broken link or anchor fails it.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/docs/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(TRAINERS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis overlord-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
