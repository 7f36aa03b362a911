# Each target sets up what it needs in .venv; a second call finds it there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check lint types bench-cpu docs

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
