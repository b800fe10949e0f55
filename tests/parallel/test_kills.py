"""Whatever moment a rank is killed at, the others end soon, and a report is whole or not there."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.parallel import SCAN, alone, started, without_times, written
from tests.support.program import Program

SEEDS = range(20)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """Return a folder, the report of one process, and how long several take."""
    folder = tmp_path_factory.mktemp("usual")
    written(folder)
    assert alone(folder, *SCAN, "-o", "one.json").returncode == 0
    since = time.monotonic()
    for process in (ranks := started(folder, 3, *SCAN, "-o", "ranks.json")):
        process.communicate()
    seconds = time.monotonic() - since
    assert [process.returncode for process in ranks] == [0, 0, 0]
    for process in ranks:
        process.close()
    return folder, without_times(folder / "one.json"), seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_never_hangs_and_never_leaves_half_a_report(
    ranks: list[Program], usual: tuple[Path, str, float], seed: int
) -> None:
    folder, whole, seconds = usual
    report = folder / "ranks.json"
    report.unlink(missing_ok=True)
    chance = random.Random(seed)
    victim, moment = chance.randrange(3), chance.random() * seconds
    ranks += started(folder, 3, *SCAN, "-o", "ranks.json", AMPAUDIT_RANK_TIMEOUT="30")
    time.sleep(moment)
    ranks[victim].send_signal(signal.SIGKILL)
    said = [process.communicate(timeout=120) for process in ranks]
    first = ranks[0].returncode
    if report.exists():
        assert without_times(report) == whole
        assert first in (0, -signal.SIGKILL)
    else:
        assert said[0][0] == ""
        assert first == (-signal.SIGKILL if victim == 0 else 3)
        others = [process.returncode for rank, process in enumerate(ranks) if rank not in (0, victim)]
        assert others == [3] * len(others)
    if first == 3:
        lines = [line for line in said[0][1].splitlines() if line.startswith("ampaudit: ")]
        how = ("ended", "not started within 30 s")  # before it connected, nobody knows its process
        assert lines in [[f"ampaudit: rank {victim} has {what}: nothing was reported"] for what in how]
    assert all(text == ("", "") for rank, text in enumerate(said) if rank > 0)
    assert not list(folder.glob("*.part*"))
