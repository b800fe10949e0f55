"""Several processes under torchrun: one report, and one line if a process is lost, fails or differs."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.parallel import (
    METRIC,
    MODEL,
    SCAN,
    alone,
    started,
    torchrun,
    without_times,
    written,
)
from tests.support.program import Program


@pytest.mark.parametrize("count", [2, 3, 7])
def test_torchrun_gives_one_report(folder: Path, count: int) -> None:
    alone(folder, *SCAN, "-o", "one.json")
    done = torchrun(folder, count, *SCAN, "-o", "ranks.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finite but wrong in float16") == 1
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")


def test_all_ranks_end_with_the_exit_code_of_the_first(folder: Path, ranks: list[Program]) -> None:
    ranks += started(folder, 2, "scan", "mixed.py", "--batches", "4", "--policy", "half", "--min-sqnr", "200")
    first, second = (process.communicate(timeout=120) for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1], first
    assert second == ("", "")


# a rank that stops where its batches are made, as one whose data are not there does
STOPS = MODEL.replace("    made = torch", """    if os.environ["RANK"] == "1":
        ACT
    made = torch""", 1)  # fmt: skip


def told(ranks: list[Program], seconds: float) -> list[str]:
    """Return the lines of rank 0, which ends in time, and see that no report was printed."""
    out, err = ranks[0].communicate(timeout=seconds)
    assert out == ""
    assert ranks[0].returncode == 3, err
    return [line for line in err.splitlines() if line.startswith("ampaudit: ")]


def test_a_rank_that_is_killed_is_named(folder: Path, ranks: list[Program]) -> None:
    written(folder, STOPS.replace("ACT", "open('waiting', 'w').close(); import time; time.sleep(600)"))
    ranks += started(folder, 2, *SCAN)
    while not (folder / "waiting").exists():
        time.sleep(0.1)
        assert ranks[1].poll() is None
    ranks[1].send_signal(signal.SIGKILL)
    ranks[1].wait()
    assert told(ranks, 60) == ["ampaudit: rank 1 has ended: nothing was reported"]


def test_a_rank_that_hangs_is_named(folder: Path, ranks: list[Program]) -> None:
    written(folder, STOPS.replace("ACT", "import time; time.sleep(600)"))
    ranks += started(folder, 2, *SCAN, AMPAUDIT_RANK_TIMEOUT="8")
    assert told(ranks, 60) == ["ampaudit: rank 1 has finished no batch for 8 s: nothing was reported"]


def test_the_error_of_a_rank_is_told(folder: Path, ranks: list[Program]) -> None:
    written(folder, STOPS.replace("ACT", "raise FileNotFoundError('no data on this machine')"))
    ranks += started(folder, 2, *SCAN)
    (line,) = told(ranks, 60)
    assert line.startswith("ampaudit: rank 1: ")
    assert "no data on this machine" in line
    assert ranks[1].wait(60) == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            "torch.nn.init.ones_(model.head.weight)",
            "another model: other code, other files that it imports, another loss, other twins",
        ),
        ("model.head.training = None", ""),
    ],
)
def test_a_rank_with_another_model_is_named(
    folder: Path, ranks: list[Program], change: str, what: str
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


def test_a_rank_that_runs_out_of_index_tells_the_first_batch(folder: Path, ranks: list[Program]) -> None:
    written(
        folder, MODEL.replace("yield {", "ids = ids + (1000 if number in (3, 6) else 0)\n        yield {")
    )
    ranks += started(folder, 2, *SCAN)
    out, err = ranks[0].communicate(timeout=120)
    assert (out, ranks[0].returncode) == ("", 2)
    assert "an index is beyond its table" in err
    one = alone(folder, *SCAN)
    last = [line for line in err.splitlines() if line.startswith("ampaudit: ")]
    assert last == [line for line in one.stderr.splitlines() if line.startswith("ampaudit: ")]


@pytest.mark.parametrize("body", [MODEL, MODEL + METRIC])
def test_check_divides_batches(folder: Path, body: str) -> None:
    written(folder, body)
    targets = ["mixed.py"] * (1 if body == MODEL else 2)
    words = ("check", *targets, "--batches", "9", "--policy", "torch-cuda", "--force", "-o")
    one = alone(folder, *words, "one.json")
    done = torchrun(folder, 2, *words, "ranks.json")
    assert (one.returncode, done.returncode) == (1, 1), done.stderr
    assert done.stderr.count("written to ranks.json") == 1
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")


def test_check_names_the_rank_that_fails(folder: Path) -> None:
    written(folder, STOPS.replace("ACT", "raise FileNotFoundError('no data on this machine')"))
    done = torchrun(folder, 2, "check", "mixed.py", "--batches", "9", "-o", "ranks.json")
    (target,) = json.loads((folder / "ranks.json").read_text())["targets"]
    assert target["exit_code"] == 3, done.stderr
    assert target["error"].startswith("rank 1: ")
    assert "no data on this machine" in target["error"]


@pytest.mark.parametrize("words", [("plan",), ("bench", "--repeats", "1")])
def test_what_is_not_divided_is_done_once(folder: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    done = torchrun(folder, 2, command, "mixed.py", *rest, "-o", "ranks.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("written to ranks.json") == 1


def test_progress_tells_how_far_all_ranks_are(folder: Path, ranks: list[Program]) -> None:
    body = MODEL.replace("    made = torch", '''    if os.environ.get("RANK") == "1":
        import time; time.sleep(6)
    made = torch''', 1).replace("def forward(self, ids, gain):", '''def forward(self, ids, gain):
        if os.environ.get("RANK") == "1":
            import time; time.sleep(0.5)''')  # fmt: skip
    written(folder, body)
    ranks += started(folder, 2, *SCAN)
    _, err = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == 0, err
    shown = re.findall(r"^auditing mixed\.py, other ranks at (\d+): batch 9 of 9 \.\.\.$", err, re.M)
    assert shown, err
    assert all(0 <= int(number) <= 9 for number in shown)


def test_torchrun_names_the_rank_that_it_ends_the_others_for(folder: Path) -> None:
    body = MODEL.replace("def forward(self, ids, gain):", """def forward(self, ids, gain):
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)""")  # fmt: skip
    written(folder, body)
    done = torchrun(folder, 3, *SCAN)
    assert (done.returncode, done.stdout) == (1, "")
    lines = [line for line in done.stderr.splitlines() if line.startswith("ampaudit: ")]
    named = "ampaudit: terminated, as rank 1 has ended; nothing was written"
    watched = "ampaudit: rank 1 has ended: nothing was reported"
    assert lines in ([named], [watched])  # whichever sees it first
