# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test lint results bench-bank bench-studies clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/python -m fissile.demo

test: .venv/test.stamp lint
	$(BIN)/python -m pytest -q

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The bank against a loop, torch.func and JAX, in one run (a few minutes).
bench-bank: .venv/bench.stamp
	$(BIN)/python benchmarks/bank.py

# All Boolean studies at the paper's scale against what a loop would take (some minutes).
bench-studies: .venv/demo.stamp
	$(BIN)/python benchmarks/studies.py

# Everything under results/, from nothing or from what the store in fissile-lab holds.
results: .venv/demo.stamp
	$(BIN)/fissile run all --scale paper
	$(BIN)/fissile report --scale paper --to results
	mkdir -p results/tidy
	for id in $$(sed 1d results/claims.csv | cut -d, -f1 | sort -u); do \
	  $(BIN)/fissile results $$id --scale paper --format parquet --to results/tidy/$$id.parquet; done

clean:
	rm -rf .venv fissile-demo

# A stamp is newer than what it was made from, so a second run installs nothing.
.venv/demo.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[all]'
	@touch $@

.venv/test.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@

.venv/bench.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[bench]'
	@touch $@

.venv/made.stamp:
	$(PYTHON) -m venv .venv || { echo "fissile needs python3-venv (Debian: apt install python3-venv)"; exit 1; }
	@touch $@
