# Everything on a fresh machine: `make demo`, then `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-fast test-slow test-portable lint check browser charts schema docs-site aten bench fuzz clean

demo: $(VENV)/.demo
	$(BIN)/ampaudit scan examples/t5_feed_forward.py --policy torch-cuda --fail-on never

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

# without what starts programs or browsers, converts, trains, or compares whole architectures
HEAVY := audit/test_advice audit/test_bad_input audit/test_combined_policy audit/test_cures audit/test_findings audit/test_healthy \
	audit/test_index_errors cli/test_interrupts linter/test_lint_files \
	audit/test_quiet audit/test_silent audit/test_stress benchmarking/test_largest benchmarking/test_modes \
	benchmarking/test_predict bounds/test_proof_examples ci/test_check ci/test_plugin cli/test_cli \
	cli/test_terminal export/test_fold export/test_huggingface export/test_plan_file \
	export/test_sentence_model export/test_verify fuzz/test_crafted fuzz/test_mutations \
	linter/test_lint_cli linter/test_lint_oracle render/test_html render/test_outputs report/test_pages report/test_saved \
	run/backward/test_custom_backward run/backward/test_gradients run/test_accuracy run/test_compare \
	run/test_eager_agrees run/test_evidence run/test_fp32 run/test_run source/test_stream test_api \
	test_docs_blocks test_examples trace/test_half trace/test_trace trace/test_traced_is_run \
	training/test_prepare training/test_recipes

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow" $(HEAVY:%=--ignore=tests/%.py)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m slow

test-portable: $(VENV)/.dev
	tools/portable.sh $(BIN)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

browser: $(VENV)/.dev
	tools/browser.sh $(BIN)

charts:
	cd tools/charts && npm install --no-package-lock --no-audit --no-fund && npm run build

schema: $(VENV)/.dev
	$(BIN)/python -c "from ampaudit.render.json import report_schema_text; print(report_schema_text(), end='')" > docs/report.schema.json
	$(BIN)/python -c "from ampaudit.policy.schema import rules_schema_text; print(rules_schema_text(), end='')" > docs/rules.schema.json

docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

aten: $(VENV)/.dev
	$(BIN)/python -m tests.support.aten_ops > ampaudit/policy/aten_ops.txt

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/scan_overhead.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/proofs.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/reports.py
	$(BIN)/python benchmarks/linting.py

fuzz: $(VENV)/.dev
	$(BIN)/python benchmarks/fuzz.py --minutes 60 --keep dist/fuzz

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
