# Two commands do everything on a fresh clone: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test tests check docs soak chaos bench bench-gpu results setup clean

setup: $(READY)

# torch comes first and pinned, so that pip takes a CPU build where it knows of one.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedexp needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PIP) --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/fedexp toy --out out/toy.png
	@echo
	$(BIN)/fedexp compare digits --mode recommended --set local.lr=0.1 --rounds 100 \
	  --algorithms fedavg,fedexp,scaffold,fedadagrad --seeds 5 --target 0.94 \
	  --out out/digits.png --runs out/runs

# The fast gate: format, lint, types.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Types are checked beside the tests, of which some wait for other processes.
test: $(READY)
	$(MAKE) --jobs=2 check tests

tests: $(READY)
	$(BIN)/python -m pytest -n 4
	$(BIN)/python tools/check_wheel.py

# The documentation site in site/, strictly; tests/docs/test_site.py builds it as well.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# A thousand kills, full disks and damaged files, in about half an hour: make soak SOAK='--kills 100'
soak: $(READY)
	$(BIN)/python tools/soak.py $(SOAK)

# A federation whose nodes are killed, stopped and restarted, with an attacker: make chaos CHAOS='--minutes 6'
chaos: $(READY)
	$(BIN)/python tools/chaos.py $(CHAOS)

# Whatever this machine can measure, then one table of all records.
bench: $(READY)
	$(BIN)/python benchmarks/synthetic.py
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/clients.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/many_gpus.py
	$(BIN)/python benchmarks/peers.py --turns 1
	$(BIN)/python benchmarks/standard.py --generated --turns 1
	$(BIN)/python benchmarks/data_loading.py
	$(BIN)/python benchmarks/startup.py --device cpu --precision float32 --works digits --turns 2
	$(BIN)/python benchmarks/comparison.py --works digits --turns 1
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) bench-gpu; fi
	$(BIN)/python benchmarks/table.py

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu_rounds.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/comparison.py --device cuda --precision bf16

# Tables, figures, docs/reproduction.md and README's block from the runs in results/, without data.
results: $(READY)
	$(BIN)/python -m tools.results

clean:
	rm -rf $(VENV) build dist out site .mypy_cache .ruff_cache .hypothesis
