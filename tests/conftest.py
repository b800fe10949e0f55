"""Shared fixtures: fixed seeds, one thread per test process, no network; options for other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.paths import ROOT

settings.register_profile("ampaudit", deadline=None)  # how long an example takes is a matter of the machine
settings.load_profile("ampaudit")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
for _wish in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING"):
    os.environ.pop(_wish, None)  # of this terminal: a test of one of them sets its own


@pytest.fixture(autouse=True)
def _fixed_seed(pytestconfig: pytest.Config) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(pytestconfig.getoption("--threads"))


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in this process."""
    from tests.support.program import run_program

    def call(
        *arguments: object, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return run_program(*arguments, cwd=cwd, environment=environment)

    return call


@pytest.fixture
def process(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in a process of its own, as a user does: for what the interpreter takes part in."""

    def call(
        *arguments: object, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ampaudit", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": str(pytestconfig.getoption("--threads")), **environment},
            capture_output=True,
            stdin=subprocess.DEVNULL,  # a terminal there would give its width
            encoding="utf-8",
            errors="backslashreplace",
            timeout=300,
            check=False,
        )

    return call


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a model file; torch and nn are imported in it."""

    def write(body: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.write_text(f"import torch\nfrom torch import nn\n{body}", encoding="utf-8")
        return path

    return write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="rewrite tests/golden/, for review")
    parser.addoption("--threads", type=int, default=1, help="threads of torch in each test process")
    parser.addoption("--no-onednn", action="store_true", help="torch's own kernels only, in test processes")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with its golden file; ``--refresh-golden`` writes it."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--refresh-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}: pytest --refresh-golden"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs: --refresh-golden"

    return compare


# long tests of many like cases: `make test` runs one in so many, and the others are slow
ONE_IN = {
    "audit/test_advice.py::test_reported_failures_with_an_error_get_a_cure": 3,
    "audit/test_bad_input.py::test_names_are_shown_and_never_obeyed": 4,
    "audit/test_cures.py::test_what_is_printed_is_what_the_change_does": 3,
    "audit/test_healthy.py::test_it_is_quiet": 4,
    "audit/test_models.py::test_a_reported_failure_is_found_and_its_twin_is_healthy": 4,
    "audit/test_paths.py::test_a_healthy_model_is_quiet_and_its_reference_is_its_own": 8,
    "audit/test_paths.py::test_an_overflow_is_found_at_its_line": 4,
    "audit/test_quiet.py::test_a_healthy_architecture_is_quiet_and_inside_its_bounds": 4,
    "audit/test_silent.py::test_the_line_where_the_error_enters_is_named_first": 4,
    "audit/test_silent.py::test_the_repaired_twin_passes": 4,
    "benchmarking/test_predict.py::test_memory_is_predicted_but_for_what_kernels_take": 3,
    "bounds/test_bounds.py::test_what_a_run_computes_is_inside": 4,
    "cli/test_cli.py::test_bad_input_is_one_clear_line": 4,
    "cli/test_current_folder.py::test_no_command_imports_what_it_finds": 4,
    "cli/test_interrupts.py::test_a_signal_that_an_exception_does_not_carry": 4,
    "cli/test_interrupts.py::test_without_a_home": 4,
    "audit/test_against.py::test_a_random_change_is_named": 4,
    "export/test_fold.py::test_folding_changes_no_bit": 4,
    "export/test_onnx_convert.py::test_an_odd_graph_is_converted": 2,
    "export/test_plan_file.py::test_the_plan_file_makes_the_same_graph": 4,
    "export/test_sentence_model.py::test_a_fresh_process_computes_the_embeddings": 4,
    "fuzz/test_mutations.py::test_a_mutated_input_is_accepted_or_refused": 3,
    "render/test_html.py::test_a_page_made_of_sections": 4,
    "render/test_html.py::test_every_page_opens_at_every_width": 4,
    "render/test_html.py::test_names_are_shown_and_not_obeyed": 4,
    "render/test_html.py::test_no_barrier_that_axe_finds": 4,
    "run/backward/test_gradients.py::test_the_reference_is_autograds_gradient": 3,
    "run/test_accuracy.py::test_the_culprit_is_found_in_a_number_of_runs_that_grows_like_a_logarithm": 4,
    "run/test_run.py::test_emulated_and_native_kernels_agree": 4,
    "source/onnx/test_whole_models.py::test_every_node_computes_what_the_runtime_computes": 2,
    "source/test_onnx_models.py::test_generated_models_run_and_are_deterministic": 3,
    "source/test_hostile_directories.py::test_what_cannot_be_built_is_refused": 4,
    "trace/test_trace.py::test_half_gives_the_dtypes_of_a_real_half_model": 3,
    "trace/test_trace.py::test_thirteen_architectures_trace_with_layers_and_lines": 3,
    "trace/test_trace.py::test_torch_cuda_gives_the_dtypes_of_real_cuda_autocast": 3,
    "tuning/test_minimal.py::test_it_keeps_at_most_one_op_more_than_the_fewest": 10,
    "tuning/test_minimal.py::test_no_op_of_an_exhaustive_search_may_go": 10,
    "tuning/test_oracle.py::test_it_computes_what_16_bit_kernels_compute": 6,
    "tuning/test_oracle.py::test_it_computes_what_an_audit_computes": 6,
    "tuning/test_oracle.py::test_targets_need_some_ops_but_not_all": 4,
    "tuning/test_sensitivity.py::test_a_mixed_run_computes_what_the_judge_does": 6,
}


def _leave_like_cases(items: list[pytest.Item]) -> None:
    """Mark all cases but one in so many as slow, in the order of their names, which no plugin changes."""
    seen: dict[str, int] = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in ONE_IN and item.get_closest_marker("slow") is None:
            seen[name] = seen.get(name, -1) + 1
            if seen[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    _leave_like_cases(items)

    if config.getoption("--no-onednn"):
        torch._C._set_mkldnn_enabled(False)  # torch.backends refuses once a test has locked the flags
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
