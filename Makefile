# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# pip would compile on one core, and what nobody imports; some files are no Python, and stay as they are.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|models|rllib)/' .venv/lib >/dev/null || true
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick suite fuzz attack coverage lint docs dist results bench-bank bench-cluster bench-cluster-check bench-cnn bench-pack bench-play bench-sklearn bench-store bench-stream bench-studies clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/python -m fissile.cli.demo

test: .venv/test.stamp
	@$(MAKE) --no-print-directory --jobs 2 suite lint

# The fast tests, for the loop while editing (about a minute).
quick: .venv/test.stamp
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" tests/unit

suite: .venv/test.stamp
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Damaged files of every format, for so many minutes; what is found is printed.
MINUTES ?= 5
fuzz: .venv/test.stamp
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

# All attacks of docs/reliability.md, as its table (half an hour on two idle cores).
attack: .venv/test.stamp
	nice $(BIN)/python tests/attack.py

# The lines and branches that tests reach of what reads and writes files (some minutes).
READERS := $(addprefix tests/unit/,_common cli data io lab/store packed test_fixtures.py test_fuzz.py) \
  tests/integrations/test_data_cli.py tests/integrations/test_pack_cli.py
coverage: .venv/test.stamp
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 0 $(READERS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site.
docs: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel and a source distribution in dist/.
dist: .venv/test.stamp
	rm -rf dist
	$(BIN)/python -m hatchling build

# The bank against a loop, torch.func and JAX, in one run (a few minutes).
bench-bank: .venv/bench.stamp
	$(BIN)/python benchmarks/bank.py

# Ray workers against a local run, into docs/ (two minutes).
bench-cluster: .venv/test.stamp
	$(BIN)/python benchmarks/cluster.py --scale paper --trials 2 --to benchmarks/results/cluster.json
	$(BIN)/python docs/scripts/cluster.py
	$(BIN)/python docs/scripts/include.py

# The same trials locally and on Ray, also with a worker killed, to the bit (some minutes). On a GPU:
# make bench-cluster-check DEVICE=cuda
bench-cluster-check: .venv/test.stamp
	$(BIN)/python benchmarks/cluster_check.py --device $(DEVICE)

# The paper's CNN against loops a user would write (a minute, needs a GPU).
bench-cnn: .venv/demo.stamp
	$(BIN)/python benchmarks/cnn.py

# Packed layers against dense and sparse ones (some minutes on two cores), and the chart of it in
# docs/. On a GPU: make bench-pack DEVICE=cuda
bench-pack: .venv/demo.stamp
	$(BIN)/python benchmarks/pack.py --device $(DEVICE)
	$(BIN)/python benchmarks/pack_chart.py
	$(BIN)/python docs/scripts/include.py

# How soon the page of fissile play answers, and its memory over many moves (some minutes).
bench-play: .venv/test.stamp
	$(BIN)/python benchmarks/play.py

# FissileClassifier beside other classifiers at several budgets, into docs/ (half an hour).
bench-sklearn: .venv/test.stamp
	$(BIN)/python benchmarks/sklearn_table.py
	$(BIN)/python docs/scripts/include.py

# A store of 200,000 trials: the time and memory of the commands that read it (some minutes).
bench-store: .venv/demo.stamp
	$(BIN)/python benchmarks/store.py

# Features of ImageNet's size, mapped from a file against held in memory (some minutes).
bench-stream: .venv/demo.stamp
	$(BIN)/python benchmarks/stream.py

# All Boolean studies at the paper's scale against what a loop would take (some minutes).
bench-studies: .venv/demo.stamp
	$(BIN)/python benchmarks/studies.py

# Everything under results/, from the trials in results/trials: only what is not there is trained, if
# its data are here. FEATURES stand in for CLIP's, and are named beside every number. CNNs need a GPU:
# make results DEVICE=cuda
FEATURES ?= cifar100-efficientnet-lite2
DEVICE ?= cpu
MADE := codes superposition interference capacity cosine circuits clustered embed-neurons \
  embed-clauses theory
ON_FEATURES := cifar100 equivalence timing cosine-width feature-demand structured dynamic-search \
  dynamic single-mask dropconnect deep
ON_SETS := foretell interference-real guided
results: export FISSILE_LAB := results/store
results: .venv/demo.stamp
	$(BIN)/fissile take results/trials/*.parquet
	$(BIN)/fissile run $(MADE) --scale paper --device $(DEVICE)
	-$(BIN)/fissile run fashionmnist --scale paper --device $(DEVICE)
	-$(BIN)/fissile run clinc150 --scale paper --device $(DEVICE)
	-$(BIN)/fissile run $(ON_FEATURES) --scale paper --device $(DEVICE) --set data=$(FEATURES)
	-[ $(DEVICE) = cpu ] || $(BIN)/fissile run cnn-256 cnn-512 --scale paper --trials 3 --device $(DEVICE)
	-$(BIN)/fissile run $(ON_SETS) --scale paper --device $(DEVICE)
	-[ $(DEVICE) = cpu ] || $(BIN)/fissile run transformer --scale paper --device $(DEVICE)
	$(BIN)/fissile report --scale paper --to results
	for id in $$(sed 1d results/claims.csv | cut -d, -f1 | sort -u); do \
	  $(BIN)/fissile results $$id --scale paper --format parquet --to results/tidy/$$id.parquet; \
	  $(BIN)/fissile results $$id --scale paper --format trials --to results/trials/$$id.parquet; \
	  done
	$(BIN)/python docs/scripts/readings.py
	$(BIN)/python docs/scripts/front.py
	$(BIN)/python docs/scripts/foretell.py
	$(BIN)/python docs/scripts/include.py

clean:
	rm -rf .venv fissile-demo

# A stamp is newer than what it was made from, so a second run installs nothing.
.venv/demo.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[data,files,lab,sklearn]'
	@$(COMPILE)
	@touch $@

.venv/test.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@

.venv/bench.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[bench]'
	@$(COMPILE)
	@touch $@

.venv/made.stamp:
	$(PYTHON) -m venv .venv || { echo "fissile needs python3-venv (Debian: apt install python3-venv)"; exit 1; }
	@$(PIP) pip || true # an older one takes half a minute longer
	@touch $@
