"""A model whose segments are divided among ranks gives the report of one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.parallel import MODEL, PROMOTING, SCAN, alone, torchrun, without_times

MEASURED = (
    "scan",
    "mixed.py",
    "--batches",
    "9",
    "--policy",
    "promoting.yaml",
    "--fail-on",
    "never",
    "--force",
)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, MEASURED),
        (2, SCAN),
        (3, SCAN),
        (2, (*SCAN, "--ranges")),
        (2, (*SCAN, "--policy", "half")),
    ],
)
def test_a_pipeline_gives_the_report_of_one_process(folder: Path, count: int, words: tuple[str, ...]) -> None:
    (folder / "promoting.yaml").write_text(PROMOTING)
    assert alone(folder, *words, "-o", "one.json").returncode == 0
    done = torchrun(folder, count, *words, "--pipeline", "-o", "ranks.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("written to ranks.json") == 1
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")


def test_each_rank_of_a_pipeline_calls_the_model_once_per_batch(folder: Path) -> None:
    """All but the last rank once traced each batch twice, so that a model that counts was ahead there."""
    body = MODEL.replace("self.table, ", "self.calls = 0; self.table, ").replace(
        "x = self.table(ids)", "self.calls += 1; x = self.table(ids) * self.calls"
    )
    (folder / "mixed.py").write_text(body)
    assert alone(folder, *SCAN, "-o", "one.json").returncode == 0
    done = torchrun(folder, 2, *SCAN, "--pipeline", "-o", "ranks.json")
    assert done.returncode == 0, done.stderr
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")


def test_a_batch_that_fails_ends_all_ranks_of_a_pipeline(folder: Path) -> None:
    """The next rank once waited for that batch until its time was over."""
    body = MODEL.replace("yield {", "ids = ids + (1000 if number == 2 else 0)\n        yield {")
    (folder / "mixed.py").write_text(body)
    one = alone(folder, *SCAN)
    assert one.returncode == 2
    start = time.monotonic()
    done = torchrun(folder, 2, *SCAN, "--pipeline")
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert one.stderr.strip().splitlines()[-2] in done.stderr
    assert "PASS" not in done.stdout + done.stderr


def test_a_pipeline_needs_ranks(folder: Path) -> None:
    done = alone(folder, *SCAN, "--pipeline")
    assert done.returncode == 2
    assert "start it with torchrun" in done.stderr
