# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/python -m fissile.demo

test: .venv/test.stamp lint
	$(BIN)/python -m pytest -q

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv fissile-demo

# A stamp is newer than what it was made from, so a second run installs nothing.
.venv/demo.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[all]'
	@touch $@

.venv/test.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@

.venv/made.stamp:
	$(PYTHON) -m venv .venv || { echo "fissile needs python3-venv (Debian: apt install python3-venv)"; exit 1; }
	@touch $@
