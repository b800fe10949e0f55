"""The pytest plugin as a project uses it: a fixture, defaults in the ini file, a message that says all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import AuditError, UsageError

TESTS = """
import torch
from torch import nn

def model(gain):
    made = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        made[0].weight.fill_(gain)
    return made

def test_breaks(assert_safe):
    assert_safe(model(5e4), torch.ones(2, 8))

def test_is_safe(assert_safe):
    report = assert_safe(model(1.0), torch.ones(2, 8), dtype="bfloat16")
    assert report.run.policy == "half"
    assert report.run.dtype == "bfloat16"
"""


def project(
    path: Path, *arguments: str, ini: str = "ampaudit_policy = half"
) -> subprocess.CompletedProcess[str]:
    (path / "test_models.py").write_text(TESTS)
    (path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments],
        cwd=path, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_in_a_project_of_its_own(tmp_path: Path) -> None:
    done = project(tmp_path, "--ampaudit-report", "reports")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    for expected in (
        "the model is not safe in float16 under policy half",
        "FAIL  1 place breaks in float16",
        "AMP101 overflow",
        "limit 65,504",
        "report written to reports/test_models.py-test_breaks.html",
    ):
        assert expected in done.stdout, done.stdout
    assert "torch.__trace" not in done.stdout
    assert "assertion.py" not in done.stdout.split("short test summary")[0].split("test_models.py:15")[0]
    names = {path.name for path in (tmp_path / "reports").iterdir()}
    tests = ("test_models.py-test_breaks", "test_models.py-test_is_safe")
    assert names == {f"{test}.{form}" for test in tests for form in ("json", "html")}


def test_paths_hold_where_a_test_or_pytest_runs_elsewhere(tmp_path: Path) -> None:
    """Reports are written below the folder where pytest was started; a rule file lies beside the ini file."""
    (tmp_path / "rules.yaml").write_text("name: ours\ntitle: ours\nextends: [half]\nrules: []\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nampaudit_policy = rules.yaml\n")
    started, elsewhere = tmp_path / "tests", tmp_path / "elsewhere"
    started.mkdir()
    elsewhere.mkdir()
    (started / "test_moved.py").write_text(
        "import os, torch\n"
        "def test_moved(assert_safe):\n"
        f"    os.chdir({str(elsewhere)!r})\n"
        "    report = assert_safe(torch.nn.Linear(4, 4).eval(), torch.ones(2, 4))\n"
        "    assert report.run.policy == 'ours'\n"
    )
    for workers in ((), ("-n", "1")):
        folder = f"reports{len(workers)}"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *workers,
            "--ampaudit-report",
            folder,
        ]
        done = subprocess.run(command, cwd=started, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert {file.suffix for file in (started / folder).iterdir()} == {".json", ".html"}
    assert not list(elsewhere.iterdir())


def test_each_set_of_parameters_has_its_own_report(tmp_path: Path) -> None:
    tests = f"""{TESTS}
import pytest

@pytest.mark.parametrize("name", ["a-b", "a b", "a/b"])
def test_many(assert_safe, name):
    assert_safe(model(1.0), torch.ones(2, 8))
"""
    (tmp_path / "test_models.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "many", "--ampaudit-report", "r"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(list((tmp_path / "r").glob("*.json"))) == 3


def test_loading_the_plugin_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def overflowing() -> nn.Module:
    made = nn.Linear(8, 8).eval()
    with torch.no_grad():
        made.weight.fill_(1e4)
    return made


def test_without_the_fixture() -> None:
    with pytest.raises(ampaudit.UnsafeModel, match="AMP101 overflow") as caught:
        ampaudit.assert_safe(overflowing(), torch.ones(2, 8), policy="half")
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report.findings[0].code == "AMP101"
    assert "\x1b" not in str(caught.value)
    report = ampaudit.assert_safe(overflowing(), torch.ones(2, 8), policy="half", allow=["AMP101"])
    assert report.findings[0].code == "AMP101"
    assert ampaudit.assert_safe(overflowing(), torch.ones(2, 8)).promoted  # the default policy cures it


def test_budgets_of_headroom_and_accuracy() -> None:
    model, small = nn.Linear(8, 8).eval(), torch.ones(2, 8) / 256  # the output is larger
    bits = ampaudit.assert_safe(model, small, min_headroom=3.0, min_sqnr=30.0)
    assert bits.exit_code == 0
    with pytest.raises(
        ampaudit.UnsafeModel, match=r"min-headroom at \(top\)/linear: headroom \d+\.\d+ bits, 30 required"
    ):
        ampaudit.assert_safe(model, small, min_headroom=30.0)
    with pytest.raises(ampaudit.UnsafeModel, match="min-sqnr at outputs"):
        ampaudit.assert_safe(model, small, min_sqnr=500.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_headroom": "3"}, "min_headroom = '3'"),
        ({"min_sqnr": float("nan")}, "nan is not a valid limit"),
        ({"config": None}, "config: no such option"),
        ({"fail_on": "all"}, "fail_on = 'all'"),
        ({"policy": "half,apex-o2"}, "unknown policy 'half,apex-o2'"),
        ({"allow": [1]}, "--allow 1: no such check"),
        ({"seed": 2**63}, "--seed 9223372036854775808 is too large"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError) as caught:
        ampaudit.assert_safe(nn.Linear(8, 4).eval(), torch.ones(2, 8), **options)
    assert message in str(caught.value)


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(UsageError, match="AMP1O1"):
        ampaudit.assert_safe(nn.Linear(8, 8), torch.ones(2, 8), allow=["AMP1O1"])
