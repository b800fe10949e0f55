# Everything on a fresh machine: `make demo`, then `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# without it every process would compile again what it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-long measure test-portable lint check kernel browser charts schema stub docs-site aten bench fuzz clean

demo: $(VENV)/.demo
	$(BIN)/ampaudit scan examples/t5_feed_forward.py --policy torch-cuda --fail-on never

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 1

# what `make test` leaves out, by the rule in tools/tiers.py
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 2

# what is too long to be run on each change
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 3

# the processor seconds of each test, and, in a run of its own since recording takes time, the lines that it executes:
# which tier it is in follows from them, and mutants are run by them
measure: $(VENV)/.dev
	rm -rf dist/measured && mkdir -p dist/measured
	-AMPAUDIT_TIMES=$(CURDIR)/dist/measured/times.jsonl \
		$(BIN)/python -m pytest -n 2 --dist loadfile -p tests.support.measured
	-AMPAUDIT_TIMES=/dev/null COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
		$(BIN)/python -m pytest -n 2 --dist loadfile -p tests.support.measured
	$(BIN)/coverage combine --quiet
	$(BIN)/python -m tools.tiers --times dist/measured/times.jsonl --coverage dist/measured/coverage

test-portable: $(VENV)/.dev
	tools/portable.sh $(BIN)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# the kernel for CUDA in the interpreter of Triton, whose 286 MB only this test needs
kernel: $(VENV)/.dev
	$(PIP) triton
	$(BIN)/python -m pytest tests/run/test_fused.py

browser: $(VENV)/.dev
	tools/browser.sh $(BIN)

charts:
	cd tools/charts && npm install --no-package-lock --no-audit --no-fund && npm run build

# after a change of the public functions or of the records of their options
stub: $(VENV)/.dev
	$(BIN)/python -m tools.stub
	$(BIN)/ruff check --fix-only --quiet ampaudit/__init__.pyi
	$(BIN)/ruff format --quiet ampaudit/__init__.pyi

schema: $(VENV)/.dev
	$(BIN)/python -c "from ampaudit.report.documents import report_schema_text; print(report_schema_text(), end='')" > docs/report.schema.json
	$(BIN)/python -c "from ampaudit.policy.schema import rules_schema_text; print(rules_schema_text(), end='')" > docs/rules.schema.json

docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

aten: $(VENV)/.dev
	$(BIN)/python -m tests.support.aten_ops > ampaudit/policy/aten_ops.txt

# of one machine on one day; benchmarks/README.md shows the figures
bench: $(VENV)/.dev
	for name in scan_overhead commands growth planning proofs checkpoints training reports linting; do \
		$(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$(date +%F)-cpu-$$name.json || exit 1; \
	done

fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fuzz --minutes 60 --keep dist/fuzz

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e '.[docs]'
	touch $@
