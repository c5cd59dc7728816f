# What newcomers and contributors run. Needs Python 3.11 or newer, git and make; each target makes
# the virtual environment it needs.
#
#   make demo        install, then run the main job (examples/quickstart.py)
#   make test        install, then run the tests, two files at a time (ARGS="-k matmul" passes options
#                    to pytest; JOBS=0 runs all in one process)
#   make test-properties   the property-based tests with 2,000 examples (EXAMPLES=500 draws fewer)
#   make test-ops    torch's operator database on the simulated device and through the lowering (some
#                    minutes; ARGS="device add" runs a part)
#   make test-zoo    train small models of every kind on the simulated device, each also compiled (minutes)
#   make lint        ruff (rules and format) and mypy
#   make docs-test   run every Python block of README.md and docs/
#   make bench       run the benchmarks
#   make tables      tune the shipped matmul for the layers of public models, write the shipped tables (hours)
#   make clean       remove what was built; make distclean removes the environment too
#
# pip's own settings apply (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...), for example to take a
# CPU-only build of PyTorch, which is much smaller.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test files run beside each other; more than two processes want more than 16 GB of memory.
JOBS ?= 2
EXAMPLES ?= 2000
SHELL := /bin/sh
# The tests bring TorchTPU into the environment; it would load itself with torch, where the simulated
# device is wanted. On a machine with a TPU: make demo TORCH_DEVICE_BACKEND_AUTOLOAD=1
TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0
export TORCH_DEVICE_BACKEND_AUTOLOAD

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_FILES := pyproject.toml setup.py
# mypy knows no package-dir mapping: it checks a tree of links that looks like the installed package.
TYPECHECK := build/typecheck/tpu_kernels

TABLE_SHAPES ?= square llama3-8b llama3-70b

.PHONY: help demo test test-properties test-ops test-zoo lint format docs-test bench tables clean distclean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
		echo "'$(PYTHON)' was not found. Install Python 3.11 or newer, or name it:" \
			"make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "tpu_kernels needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
			"Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu, first: apt-get install python3-venv" >&2; \
		exit 1; }

# The extra 'aot' (the TPU compiler) installs nothing where no wheel of it exists: see pyproject.toml.
$(VENV)/.installed: $(BIN)/python $(BUILD_FILES)
	@echo "Installing tpu_kernels with PyTorch, JAX and the TPU compiler into $(VENV): some minutes."
	$(PIP) install --editable '.[aot]'
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(BUILD_FILES)
	@echo "Installing tpu_kernels with everything for its tests into $(VENV): some minutes."
	$(PIP) install --editable '.[aot,dev]'
	@# A plug-in of another project is part of this one: its tests are skipped where it cannot be had.
	$(PIP) install --editable '.[torch-tpu-cpu]' \
		|| echo "TorchTPU on the CPU cannot be installed here: its tests (marker torch_tpu) will be skipped."
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

test-properties: $(VENV)/.installed-dev
	TPU_KERNELS_EXAMPLES=$(EXAMPLES) $(BIN)/pytest tests/registry/test_properties.py --timeout=0 $(ARGS)

test-ops: $(VENV)/.installed-dev
ifeq ($(ARGS),)
	$(BIN)/python -m tests.opinfo device
	$(BIN)/python -m tests.opinfo lowering
else
	$(BIN)/python -m tests.opinfo $(ARGS)
endif

test-zoo: $(VENV)/.installed-dev
	TPU_KERNELS_ZOO=all $(BIN)/pytest tests/zoo --timeout=0 $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)
	@ln -s $(CURDIR)/tpu_kernels/* $(CURDIR)/dsl $(CURDIR)/registry $(TYPECHECK)
	cd $(dir $(TYPECHECK)) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir ../mypy_cache $(notdir $(TYPECHECK))

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs-test: $(VENV)/.installed-dev
	$(BIN)/pytest tests/packaging/test_docs.py $(ARGS)

bench: $(VENV)/.installed
	@set -e; for script in benchmarks/*.py; do \
		echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

tables: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/matmul_tables.py --out tpu_kernels/tuning/tables
	for shapes in $(TABLE_SHAPES); do \
		$(BIN)/tpu-kernels tune tpu::matmul --shapes $$shapes --target v5e,v5p,v6e,tpu7x --trials 24 $(ARGS) \
			|| exit 1; \
	done
	$(BIN)/tpu-kernels cache export --format tables --kernel tpu::matmul tpu_kernels/tuning/tables
	$(BIN)/python benchmarks/attention_tables.py --out tpu_kernels/tuning/tables
	$(BIN)/python benchmarks/attention_tables.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
