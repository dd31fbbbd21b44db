# Everything runs inside .venv, made on first use from Python and this file alone.
# Tests start many processes: where bytecode is not kept, each of them compiles torch anew, for seconds.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
AUDIT  := .venv-audit
PEERS  := $(VENV)/.installed-peers
LOOPS  := $(VENV)/.installed-loops
BENCH  ?= step layers scale replicas

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types unit unit-reproduction coverage bench correctness pages loops loops-page docs licences audit wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

comma := ,

# uv resolves in seconds; plain pip does the same job, slower, where uv has no wheel.
define install
	@echo "--> installing slangvi[$(1)] into $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || echo "    uv is not available: using pip"
	@if [ -x $(BIN)/uv ]; then \
	  UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/uv pip install --quiet -c constraints.txt -e '.[$(1)]' $(2); \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]' $(2); \
	fi
	@touch $@
endef

$(DEMO): pyproject.toml constraints.txt
	$(call install,demo)

$(STAMP): pyproject.toml reproduction/pyproject.toml constraints.txt
	$(call install,dev,-e ./reproduction)
	@touch $(DEMO)

demo: $(DEMO) ## install, train on embedded data, print the table, write demo.png
	@echo "--> slangvi demo"
	@$(BIN)/slangvi demo --out demo.png

test: $(STAMP) lint types unit unit-reproduction ## install, lint, type-check, run tests and doctests

lint: $(STAMP) ## ruff: style, docstrings, imports
	@echo "--> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict on both packages
	@echo "--> mypy --strict"
	@$(BIN)/mypy

unit: $(STAMP) ## tests and doctests of the library, two workers
	@echo "--> pytest, the library"
	@$(BIN)/python -m pytest -q -n 2 -m "not slow" $(PYTEST_ARGS)

unit-reproduction: $(STAMP) ## tests and doctests of the reproduction, two workers
	@echo "--> pytest, the reproduction"
	@cd reproduction && ../$(BIN)/python -m pytest -q -n 2 -m "not slow" $(PYTEST_ARGS)

coverage: override PYTEST_ARGS += --cov --cov-report=term --cov-fail-under=95
coverage: unit unit-reproduction ## the same; tests must cover 95 % of each package

# The list is complete and nothing else is resolved, so that no peer can bring another torch.
$(PEERS): $(STAMP) reproduction/benchmarks/peers.txt
	@echo "--> installing the peers into $(VENV)"
	@if [ -x $(BIN)/uv ]; then \
	  VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/uv pip install --quiet --no-deps -r reproduction/benchmarks/peers.txt; \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r reproduction/benchmarks/peers.txt; \
	fi
	@touch $@

bench: $(PEERS) ## measure against Adam, IVON and others, write docs/performance.md
	@for name in $(BENCH); do \
	  echo "--> slangvi bench $$name $(BENCH_ARGS)" && $(BIN)/slangvi bench $$name $(BENCH_ARGS) || exit 1; \
	done
	@$(BIN)/slangvi bench report

$(LOOPS): $(STAMP)
	$(call install,dev$(comma)loops,-e ./reproduction)

loops: $(LOOPS) ## install Lightning, Hugging Face and TensorBoard, run the training loops with them
	@$(BIN)/python -m pytest -q tests/examples tests/test_tracking.py

loops-page: $(STAMP) ## write docs/loops.md from examples/loops
	@$(BIN)/python tools/loops.py

correctness: $(STAMP) ## measure every oracle, write the tables of docs/correctness.md
	@PYTHONPATH=tests $(BIN)/python -m correctness.page

pages: $(STAMP) ## renew docs/architecture.md, and the output and pictures that other pages show of their code
	@PYTHONPATH=tests $(BIN)/python -m house
	@MPLBACKEND=Agg PYTHONPATH=tests $(BIN)/python -m pages $(PAGES)

docs: $(STAMP) ## build the documentation, warnings are errors
	@echo "--> sphinx"
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "    docs/_build/html/index.html"

licences: $(LOOPS) $(PEERS) ## list the licences of direct dependencies in docs/licences.md
	@$(BIN)/python tools/licences.py

# The auditor lives apart: what it brings along is not part of what is audited. Strict: what could not be looked up, as
# everything without a network, is a failure and no clean bill. Builds such as 2.13.0+cpu are looked up as 2.13.0.
audit: $(STAMP) ## ask for known vulnerabilities of everything installed (needs the network)
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[^ ]*$$//' > $(AUDIT)/installed.txt
	@$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r $(AUDIT)/installed.txt

# Times in the archive come from the last commit, so that the bytes depend on the source alone.
wheel: $(STAMP) ## build the wheel twice into dist/, and see that the bytes are the same
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check build hatchling
	@export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 1577836800); for folder in dist build/again; do \
	  rm -rf $$folder && $(BIN)/python -m build --wheel --no-isolation --outdir $$folder . >/dev/null || exit 1; \
	done
	@cmp dist/*.whl build/again/*.whl && echo "the same twice: $$(ls dist/*.whl)"

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(AUDIT) docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage reproduction/.pytest_cache reproduction/.hypothesis
