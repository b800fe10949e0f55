"""Shared fixtures: fixed seeds, one thread per test process, no network; options for other machines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.leftovers import nothing_is_left, temporary_folder  # noqa: F401
from tests.support.paths import ROOT
from tools.tiers import read_tiers

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
def model_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a model file; torch and nn are imported in it."""

    def write(body: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.write_text(f"import torch\nfrom torch import nn\n{body}", encoding="utf-8")
        return path

    return write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="rewrite tests/golden/, for review")
    parser.addoption(
        "--tier",
        type=int,
        choices=[1, 2, 3],
        help="run the tests of one tier only; tools/tiers.py has the rule",
    )
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


def pytest_configure(config: pytest.Config) -> None:
    # read when a library is loaded, here and in child processes
    os.environ["OMP_NUM_THREADS"] = str(config.getoption("--threads"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if (tier := config.getoption("--tier")) is not None:
        tiers = read_tiers(ROOT / "tests" / "tiers.txt")
        config.hook.pytest_deselected(items=[item for item in items if tiers.get(item.nodeid, 1) != tier])
        items[:] = [item for item in items if tiers.get(item.nodeid, 1) == tier]
    if config.getoption("--no-onednn"):
        torch._C._set_mkldnn_enabled(False)  # torch.backends refuses once a test has locked the flags
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
