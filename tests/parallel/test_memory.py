"""``--memory``: what a plan states before the run, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import scan_policies
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.report.documents import parse_document
from ampaudit.report.plan import PlannedMemory, PlanReport
from ampaudit.run.share import Share
from ampaudit.source.open import open_source
from tests.support.parallel import run, scanned, without_times

MEMORY = ("--memory", "140kB")
DEEP = """
import torch
from torch import nn
def get_model(): return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
def example_inputs(): return torch.ones(4, 64)
def batches():
    for _ in range(9): yield torch.randn(4, 64)
"""


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def planned(folder: Path, memory: str) -> PlannedMemory:
    (folder / "deep.py").write_text(DEEP)
    words = ("deep.py", "--batches", 9, "--policy", "half", "--memory", memory, "-o", "p.json", "--force")
    done = run("plan", *words)
    assert done.exit_code == 0, done.output
    plan = parse_document((folder / "p.json").read_text(), "p.json")
    assert isinstance(plan, PlanReport)
    assert plan.memory is not None
    return plan.memory


def test_a_plan_states_the_segments_and_what_waits(folder: Path) -> None:
    few, many = planned(folder, "1MB"), planned(folder, "200kB")
    assert len(few.segments) == 1 < len(many.segments)
    for found in (few, many):
        assert found.batches == 9
        assert found.largest == max(s.weights + s.values for s in found.segments) <= found.limit
        assert sum(s.weights for s in found.segments) == 12 * 4 * (64 * 64 + 64)  # each in one segment
        assert found.segments[-1].boundary == 0
    assert few.waiting == 0
    # between two layers: 4 x 64 values of both runs, carried in float32, of every batch
    assert {s.boundary for s in many.segments[:-1]} == {2 * 4 * 4 * 64}
    assert many.waiting == 9 * 2 * 4 * 4 * 64


def test_a_scan_by_segment_gives_the_same_report(folder: Path) -> None:
    one = without_times(scanned(folder))
    assert without_times(scanned(folder, *MEMORY)) == one


class Counting(Share):
    """A share that counts how often the other machines are checked."""

    checks = 0

    def check_others(self) -> None:
        self.checks += 1


def test_other_machines_are_checked_before_each_batch_of_a_segment(folder: Path) -> None:
    """Ranks once checked each other only before the first segment, and took a long run for a hung one."""
    (folder / "deep.py").write_text(DEEP)
    source = open_source("deep.py", SourceConfig(batches=9))
    whole, cut = Counting(), Counting()
    for limit, share in (("1GB", whole), ("200kB", cut)):
        scan_policies(source, [load_policy("half")], ScanConfig(memory=limit), Session(share=share))
    assert whole.checks == 9
    assert cut.checks >= 18


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--memory", "1kB"), "--memory 1 kB is too little: the largest group of ops needs"),
        (("--memory", "much"), "much"),
        (("--memory", "0"), "0"),
        ((*MEMORY, "--backward"), "--backward"),
        ((*MEMORY, "--static"), "--static"),
        ((*MEMORY, "--sensitivity"), "--sensitivity"),
        ((*MEMORY, "--steps", "2"), "--steps"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], what: str) -> None:
    done = run("scan", "mixed.py", "--batches", 9, *words)
    assert done.exit_code == 2, done.output
    assert what in str(done.exception) + done.output
    assert "Traceback" not in done.output


UNEVEN = """
import torch
from torch import nn
def get_model(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
def batches():
    for rows in (2, 400, 2): yield torch.randn(rows, 64)
"""


@pytest.mark.parametrize("more", [(), ("--part", "1/2", "-o", "part.json")], ids=["alone", "part"])
def test_the_largest_batch_decides_whether_a_memory_is_enough(folder: Path, more: tuple[str, ...]) -> None:
    """Every part gives the same answer: once, it was that of its own first batch, in the name of the last."""
    (folder / "uneven.py").write_text(UNEVEN)
    done = run("scan", "uneven.py", "--batches", 3, "--memory", "100kB", *more)
    assert done.exit_code == 2
    assert "100 kB is too little: the largest group of ops needs" in str(done.exception)
    assert "(in batch 2)" in str(done.exception)
    assert run("scan", "uneven.py", "--batches", 3, "--memory", "2MB").exit_code == 0
