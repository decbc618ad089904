# Every target sets up all it needs in .venv, from nothing but python3 (>= 3.10) with venv.
# With TORCH=2.11.0 any of them does the same on that version of torch, in .venv-torch-2.11.0.
PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
# So many workers; who is done takes half of what another one has left. WORKERS= runs one test after the other. Tests
# marked `quiet` have bounds in seconds and wait for most of their time: they run beside each other, not beside those
# that keep all cores busy.
WORKERS ?= 2
PARALLEL := $(if $(WORKERS),-n $(WORKERS) --dist worksteal)
# The files with tests that have a mark: collecting all files takes each worker ten seconds. tests/rules/test_seeded.py
# checks that no other file sets one.
marked_files = $(if $(PYTEST_ARGS),,$(shell grep -rlw --include='test_*.py' 'mark\.$(1)' tests))
# A command that `test` runs beside the quiet tests, at the lowest priority: in CI, the oldest torch's tests.
BESIDE ?= true
# Some machines forbid Python to keep what it has compiled; each of a hundred processes then compiles all of it again.
export PYTHONDONTWRITEBYTECODE :=
MYPY := $(BIN)/mypy --no-error-summary

.DEFAULT_GOAL := help
.PHONY: help test marked demo bench campaign lint style format docs dist setup clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Torch's own annotations differ between its versions, so the code is checked against the newest only: in the cores' time
# that the quiet tests leave.
test: $(if $(TORCH),$(INSTALLED),style) ## lint, type check and all tests; benchmarks in their smoke form
	@echo "test: $(if $(TORCH),,types and )all tests; benchmarks run once, untimed"
	@status=0; $(if $(TORCH),true,nice -n 19 $(MYPY)) >$(VENV)/types.log 2>&1 & types=$$!; \
	nice -n 19 $(BESIDE) >$(VENV)/beside.log 2>&1 & beside=$$!; \
	files="$(call marked_files,quiet)"; \
	for kind in quiet "not quiet"; do \
		CROSSOVER_BENCH=smoke $(BIN)/python -m pytest -m "$$kind" $(PARALLEL) $(PYTEST_ARGS) $$files; \
		case $$? in 0|5) ;; *) status=1 ;; esac; \
		files=; test "$$kind" = quiet || continue; \
		wait $$types || { cat $(VENV)/types.log; status=1; }; \
		wait $$beside || status=1; \
		cat $(VENV)/beside.log; \
	done; exit $$status  # 5: nothing of this kind was asked for

marked: $(INSTALLED) ## only the tests that depend on what torch itself does
	@echo "marked: the tests that depend on what torch itself does"
	@$(BIN)/python -m pytest -m torch_version $(PARALLEL) $(PYTEST_ARGS) $(call marked_files,torch_version)

demo: $(INSTALLED) ## two sibling jobs on an emulated two-node cluster: table, picture, JSON in runs/demo/
	@echo "demo: two sibling jobs on an emulated two-node cluster, results in runs/demo/"
	@$(BIN)/python recipes/demo.py

bench: $(INSTALLED) ## the benchmarks in full; figures are ratios, printed as a table
	@echo "bench: the benchmarks in full; keep the machine otherwise idle"
	@CROSSOVER_BENCH=full $(BIN)/python -m pytest tests/benchmarks --benchmark-enable $(PYTEST_ARGS)

campaign: $(INSTALLED) ## hours: fault campaigns, the benchmarks in full, and the studies behind docs/measurements.md
	@echo "campaign: three fault campaigns (about 45 minutes), seeded faults, the benchmarks in full, then the studies; keep the machine idle"
	@$(BIN)/python -m tests.faults.mutex_campaign --events 10000
	@$(BIN)/python -m tests.faults.campaign --events 200
	@$(BIN)/python -m tests.faults.averaging_campaign --events 1000
	@$(BIN)/python -m tests.seeded
	@$(BIN)/python -m tests.conformance.torch_ddp
	@CROSSOVER_CAMPAIGN=1 $(BIN)/python -m pytest -m quiet
	@CROSSOVER_CAMPAIGN=1 $(BIN)/python -m pytest -m "not quiet" $(PARALLEL)
	@$(MAKE) --no-print-directory bench
	@$(BIN)/python recipes/studies/run.py --claim muon codecs averaging "slow links" advice --out runs/campaign

lint: style ## ruff (rules and format) and mypy
	@echo "lint: mypy"
	@$(MYPY)

style: $(INSTALLED)
	@echo "lint: ruff check, ruff format --check"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

format: $(INSTALLED) ## let ruff sort imports and format all files
	@$(BIN)/ruff check --quiet --select I --fix
	@$(BIN)/ruff format --quiet

docs: $(INSTALLED) ## the site, from docs/ and docstrings, in build/site/index.html
	@echo "docs: the site, in build/site/index.html"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

dist: $(INSTALLED) ## build the wheel and the source archive in dist/
	@echo "dist: the wheel and the source archive, in dist/"
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null

setup: $(INSTALLED) ## create or update .venv

clean: ## remove what tools and runs have left behind, .venv too
	rm -rf .venv .venv-torch-* build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles what it loads, which is the lesser part of what pip would compile.
# pip leaves alone what already satisfies pyproject.toml, so an up-to-date .venv costs seconds.
$(INSTALLED): pyproject.toml
	@echo "setup: installing into $(VENV) (the first time this downloads PyTorch, several GB)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' $(if $(TORCH),torch==$(TORCH))
	@touch $@
