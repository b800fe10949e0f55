from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.crafted import CRAFTED
from tests.fuzz.formats import command
from tests.fuzz.judge import MEMORY, PATIENCE, SECONDS, judge, write_files
from tests.support.paths import ROOT


@pytest.mark.parametrize("title", CRAFTED)
def test_a_crafted_file_is_refused_and_runs_nothing(title: str, tmp_path: Path) -> None:
    marker, case = tmp_path / "marker", CRAFTED[title]
    files = case.make(str(marker))
    for words in case.commands:
        verdict = judge(files, command(*words))
        assert verdict.outcome != "defect", verdict.detail
        assert verdict.exit_code in case.codes, verdict.detail
    assert not marker.exists()


@pytest.mark.parametrize(
    "title",
    CRAFTED,
)
def test_the_program_refuses_it_in_time_and_memory(title: str, tmp_path: Path) -> None:
    marker, case = tmp_path / "marker", CRAFTED[title]
    for number, words in enumerate(case.commands):
        folder = tmp_path / str(number)
        write_files(folder, case.make(str(marker)))
        before = _tree(tmp_path)
        done, seconds, peak = _run(folder, words)
        assert done.returncode in case.codes, done.stderr[-1000:]
        # importing Transformers, here and in the sandbox, takes most of it and differs most by machine
        assert seconds < SECONDS * (1 + title.startswith("huggingface"))
        assert peak < MEMORY
        assert "Traceback" not in done.stderr
        assert {path for path in _tree(tmp_path) - before if "/out" not in path} == set()
    assert not marker.exists()


def _tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


_WRAPPER = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "ampaudit", *sys.argv[1:]], stdin=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\nused", used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(done.returncode)
"""


def _run(folder: Path, words: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], float, int]:
    """Run the program; return also its seconds, not those of a busy machine, and its peak in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _WRAPPER, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=PATIENCE,
        check=False,
    )
    seconds, peak = done.stdout.rsplit("used ", 1)[1].split()
    return done, float(seconds), int(peak) << 10
