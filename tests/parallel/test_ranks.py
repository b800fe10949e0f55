"""Several processes under torchrun: one report, and one line if a process is lost, fails or differs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parallel import MODEL, without_times, written

SCAN = ("scan", "mixed.py", "--batches", "9", "--policy", "torch-cuda", "--fail-on", "never", "--force")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def started(folder: Path, count: int, *words: str, **more: str) -> list[subprocess.Popen[str]]:
    """Start the ranks as a scheduler without an agent does, which does not end the others with one."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-m", "ampaudit", *words],
            cwd=folder,
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path)
    return tmp_path


@pytest.fixture
def ranks(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
def test_torchrun_gives_one_report(folder: Path, count: int) -> None:
    command = [sys.executable, "-m", "ampaudit", *SCAN, "-o", "one.json"]
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*agent, "-m", "ampaudit", *SCAN, "-o", "ranks.json"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finite but wrong in float16") == 1
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")


def test_all_ranks_end_with_the_exit_code_of_the_first(
    folder: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    ranks += started(folder, 2, "scan", "mixed.py", "--batches", "4", "--policy", "half", "--min-sqnr", "200")
    first, second = (process.communicate(timeout=120) for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1], first
    assert second == ("", "")


# a rank that stops where its batches are made, as one whose data are not there does
STOPS = MODEL.replace("    made = torch", """    if os.environ["RANK"] == "1":
        ACT
    made = torch""", 1)  # fmt: skip


def told(ranks: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Return the lines of rank 0, which ends in time, and see that no report was printed."""
    out, err = ranks[0].communicate(timeout=seconds)
    assert out == ""
    assert ranks[0].returncode == 3, err
    return [line for line in err.splitlines() if line.startswith("ampaudit: ")]


def test_a_rank_that_is_killed_is_named(folder: Path, ranks: list[subprocess.Popen[str]]) -> None:
    written(folder, STOPS.replace("ACT", "open('waiting', 'w').close(); import time; time.sleep(600)"))
    ranks += started(folder, 2, *SCAN)
    while not (folder / "waiting").exists():
        time.sleep(0.1)
        assert ranks[1].poll() is None
    ranks[1].send_signal(signal.SIGKILL)
    ranks[1].wait()
    assert told(ranks, 60) == ["ampaudit: rank 1 has ended: nothing was reported"]


def test_a_rank_that_hangs_is_named(folder: Path, ranks: list[subprocess.Popen[str]]) -> None:
    written(folder, STOPS.replace("ACT", "import time; time.sleep(600)"))
    ranks += started(folder, 2, *SCAN, AMPAUDIT_RANK_TIMEOUT="4")
    assert told(ranks, 60) == ["ampaudit: rank 1 has finished no batch for 4 s: nothing was reported"]


def test_the_error_of_a_rank_is_told(folder: Path, ranks: list[subprocess.Popen[str]]) -> None:
    written(folder, STOPS.replace("ACT", "raise FileNotFoundError('no data on this machine')"))
    ranks += started(folder, 2, *SCAN)
    (line,) = told(ranks, 60)
    assert line.startswith("ampaudit: rank 1: ")
    assert "no data on this machine" in line
    assert ranks[1].wait(60) == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("torch.nn.init.ones_(model.head.weight)", "another model, or other weights"),
        pytest.param("model.head.training = None", "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_with_another_model_is_named(
    folder: Path, ranks: list[subprocess.Popen[str]], change: str, what: str
) -> None:
    body = MODEL.replace("    return Mixed()", f"""    model = Mixed()
    if os.environ["RANK"] == "1":
        {change}
    return model""")  # fmt: skip
    written(folder, body)
    ranks += started(folder, 2, *SCAN)
    out, err = ranks[0].communicate(timeout=120)
    if what:
        assert (out, ranks[0].returncode) == ("", 2)
        assert f"rank 1 has {what}" in err
    else:
        assert ranks[0].returncode == 0, err
    assert ranks[1].wait(60) == ranks[0].returncode


def test_a_rank_that_runs_out_of_index_tells_the_first_batch(
    folder: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    written(
        folder, MODEL.replace("yield {", "ids = ids + (1000 if number in (3, 6) else 0)\n        yield {")
    )
    ranks += started(folder, 2, *SCAN)
    out, err = ranks[0].communicate(timeout=120)
    assert (out, ranks[0].returncode) == ("", 2)
    assert "an index is beyond its table" in err
    alone = subprocess.run(
        [sys.executable, "-m", "ampaudit", *SCAN],
        cwd=folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = [line for line in err.splitlines() if line.startswith("ampaudit: ")]
    assert last == [line for line in alone.stderr.splitlines() if line.startswith("ampaudit: ")]
