"""Sites of several paths: one id for one line, whichever path runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ampaudit


class Branches(nn.Module):
    """Squares on both paths; on one of them, they overflow at a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            y = self.inner(x).square() + 1
            big = y.square() * 1e5
            return big / 1e5
        y = self.inner(x) * 2
        return y.square()


def batches() -> Iterator[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.rand(4, 8)
    yield from (-x, x, -2 * x, x * 1.1)


def lines(report: ampaudit.Report, op: str) -> dict[str, str]:
    return {
        site.site: site.source.code
        for site in report.sites
        if site.site.rpartition("/")[2].startswith(op) and site.source is not None
    }


@pytest.mark.parametrize("policy", ["half", "ampaudit", "onnx"])
def test_one_id_is_one_line(policy: str) -> None:
    report = ampaudit.scan(Branches(), batches=list(batches()), policy=policy)
    assert report.path is not None
    assert report.path.count == 2
    squares = lines(report, "square")
    assert sorted(squares.values()) == [
        "big = y.square() * 1e5",
        "return y.square()",
        "y = self.inner(x).square() + 1",
    ]
    assert len({output.name for output in report.outputs}) == 1


def test_what_was_measured_on_one_path_promotes_that_path_only() -> None:
    report = ampaudit.scan(Branches(), batches=list(batches()), policy="ampaudit")
    promoted = {
        site.site: site.source.code for site in report.sites if site.rule == "ampaudit/large-constant"
    }
    assert set(promoted.values()) <= {"big = y.square() * 1e5", "return big / 1e5"}
    assert report.exit_code == 0


def test_the_order_of_the_batches_makes_no_difference_to_findings() -> None:
    found = set()
    for given in (list(batches()), list(batches())[::-1]):
        report = ampaudit.scan(Branches(), batches=given, policy="half")
        found.add(tuple(sorted((f.code, f.source.code) for f in report.findings if f.source and f.origin)))
    assert len(found) == 1
    assert {code for code, _ in found.pop()} & {"AMP101", "AMP106"}


class Steps(nn.Module):
    """A state whose decision FP32 takes one way and 16 bits, which carry their own state, another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 2048.5:
            return x * 0.5
        return x + 0.25


def test_the_path_of_a_later_step_is_that_of_fp32() -> None:
    start = torch.tensor([2048.0, 0.0])
    report = ampaudit.scan(Steps(), start, policy="half", steps=4, next_inputs=lambda output, inputs: output)
    eager, expected = start, []
    for _ in range(4):
        expected.append(bool(eager.sum() > 2048.5))
        eager = Steps()(eager)
    assert report.path is not None
    (line,) = report.path.lines
    assert line.reads == 4
    assert True in expected
    # a path of another batch would have another number of ops
    assert report.path.count == len(set(expected))
