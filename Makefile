# Few verbs; CI calls the same. `demo` and `test` do their own set-up, each is enough alone after a clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CSRC   := $(shell find csrc -name '*.cc' -o -name '*.h')
SIM_MINUTES ?= 5
export OMP_NUM_THREADS := 1

.PHONY: setup demo test lint fmt bench nightly clean

setup: $(STAMP)

$(STAMP): requirements/base.txt requirements/dev.txt pyproject.toml setup.py $(CSRC)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "found $$($(PYTHON) --version); Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat -e .
	@touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not nightly and not gpu"

nightly: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" --sim-minutes $(SIM_MINUTES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $$(find csrc tests/cpp -name '*.cc' -o -name '*.h')
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $$(find csrc tests/cpp -name '*.cc' -o -name '*.h')

bench: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/bench.txt
	$(BIN)/python benchmarks/collectives_bench.py
	$(BIN)/python benchmarks/training_bench.py
	$(BIN)/python benchmarks/switch_scale_bench.py
	$(BIN)/python benchmarks/switch_bench.py
	$(BIN)/python benchmarks/resilience_idle_bench.py

clean:
	rm -rf build trainmover_ext/*.so $(VENV)
