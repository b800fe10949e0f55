# Everything on a fresh machine: `make demo`, then `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# otherwise, each process would compile the modules that it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-long measure test-portable lint check kernel browser charts schema stub docs-site aten bench fuzz clean

demo: $(VENV)/.demo
	$(BIN)/ampaudit scan examples/t5_feed_forward.py --policy torch-cuda --fail-on never

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 1

# the second tier; tools/tiers.py has the rule
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 2

# the third tier, which is too long for each change
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier 3

# two runs, because recording lines takes time: the processor seconds of each test, then the lines that it executes;
# they decide the tier of a test, and the tests that tools/mutants.py runs for a line
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

# tests the CUDA kernel in Triton's interpreter; only this test needs Triton (286 MB)
kernel: $(VENV)/.dev
	$(PIP) triton
	$(BIN)/python -m pytest tests/run/test_fused.py

browser: $(VENV)/.dev
	tools/browser.sh $(BIN)

charts:
	cd tools/charts && npm install --no-package-lock --no-audit --no-fund && npm run build

# run it after changing public functions or the records of their options
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

# figures are those of one machine on one day; benchmarks/README.md shows them
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
