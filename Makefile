# Each target sets up what it needs in .venv; a second call finds it there.
PYTHON ?= python3
BIN := .venv/bin

# A GPU machine may bring an environment of its own: make gpu-test GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/cuda)
RESULTS := benchmarks/results
TODAY := $(shell date +%F)

.PHONY: demo test check lint types docs bench-cpu gpu-test bench

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tilewise needs Python 3.10 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,demo]' -c constraints.txt
	@touch $@

demo: .venv/ready
	$(BIN)/python demo/sentence_encoder.py

test: .venv/ready
	$(BIN)/python -m pytest -q -n 2

check: lint types

lint: .venv/ready
	$(BIN)/ruff check .

types: .venv/ready
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/python tools/support_table.py

bench-cpu: .venv/ready
	$(BIN)/python benchmarks/bench_cpu.py

# The numerics of every kernel, and its speed beside its peers (flash-attn-4 must be installed), written to RESULTS.
.venv/cuda: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[cuda]' -c constraints.txt
	@touch $@

gpu-test: $(GPU_READY)
	@for check in benchmarks/gpu/check_*.py; do what=$${check##*/check_}; what=$${what%.py}; \
		PYTHONPATH=src:. $(GPU_PYTHON) $$check --json $(RESULTS)/sm90_$${what}_numerics_$(TODAY).json || exit 1; done

bench: $(GPU_READY)
	@for bench in benchmarks/gpu/bench_*.py; do what=$${bench##*/bench_}; what=$${what%.py}; \
		PYTHONPATH=src:. $(GPU_PYTHON) $$bench --json $(RESULTS)/sm90_$${what}_$(TODAY).json || exit 1; done
