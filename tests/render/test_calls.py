"""Findings on one line say which call of the op they are about."""

from __future__ import annotations

import html
import io

import pytest
import torch
from rich.console import Console
from torch import nn

from ampaudit import scan
from ampaudit.render.render import as_file, for_terminal
from ampaudit.report.model import Report

X = torch.full((2, 4), 200.0)


class Line(nn.Module):
    """Three products on a line, of which the last two overflow in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum() + (x * 400).mean() + (x * 500).mean()


class Loop(nn.Module):
    """Doubles its input; the result leaves float16 in the ninth turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x * 2
        return x


class Two(nn.Module):
    """One op of a kind on each line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 400
        return y - (x * 350)


def scanned(model: nn.Module) -> Report:
    return scan(model.eval(), X, policy="half", dtype="float16", ignore=("AMP204",))


def text_of(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=300).print(for_terminal(report))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (Line(), ["call 2 of 3 of mul.Tensor", "call 3 of 3 of mul.Tensor"]),
        (Loop(), ["call 9 of 10 of mul.Tensor"]),
        (Two(), []),
    ],
    ids=("line", "loop", "two"),
)
@pytest.mark.parametrize("form", ["terminal", "markdown", "html", "github", "junit", "sarif"])
def test_a_finding_says_which_call_of_its_line_it_is_about(
    model: nn.Module, calls: list[str], form: str
) -> None:
    report = scanned(model)
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP101"] * max(
        len(calls), 2 - len(calls)
    )
    text = text_of(report) if form == "terminal" else html.unescape(as_file(report, form))
    assert [call in text for call in calls] == [True] * len(calls)
    assert ("of mul.Tensor on this line" in text) is bool(calls)
