"""Advice that gives up says so, and advice that is given holds."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import nn

from ampaudit import scan
from ampaudit.audit.checks import Finding
from ampaudit.render.render import as_file, for_terminal
from ampaudit.report.model import Report

FORMS = ("markdown", "html", "github", "junit", "sarif")
Function = Callable[[torch.Tensor], torch.Tensor]


class Made(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def advised(function: Function, x: torch.Tensor, policy: str = "half", dtype: str = "float16") -> Report:
    return scan(Made(function), x, policy=policy, dtype=dtype, advise=True)


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == "error"]


def text_of(report: Report) -> str:
    """Return what the terminal shows, in one line."""
    stream = io.StringIO()
    Console(file=stream, width=400).print(for_terminal(report))
    return " ".join(stream.getvalue().split())


HOPELESS: dict[str, tuple[Function, torch.Tensor]] = {
    "the code names the cast": (lambda x: x.half().float() * 1.0, torch.full((2, 4), 1e6)),
    "the cast is written as a dtype": (lambda x: x.to(torch.float16).float() + 1.0, torch.full((2, 4), 7e4)),
    "a cast behind a product": (lambda x: (x * 2).half().float() + 1.0, torch.full((2, 4), 6e4)),
}


@pytest.mark.parametrize("name", sorted(HOPELESS))
def test_what_was_tried_in_vain_is_listed_with_its_result(name: str) -> None:
    report = advised(*HOPELESS[name], policy="torch-cuda")
    first = errors(report)[0]
    assert first.all_trials_failed
    assert {trial.outcome for trial in first.tried} == {"failed"}
    text = text_of(report)
    for trial in first.tried:
        assert trial.change in text
    assert "not tried" not in text
    assert "--dtype bfloat16" not in text
    assert "nothing that was tried helps" in text
    assert report.combined is None


@pytest.mark.parametrize("form", FORMS)
def test_every_format_lists_it(form: str) -> None:
    report = advised(*HOPELESS["the code names the cast"], policy="torch-cuda")
    text = html.unescape(as_file(report, form)).replace("\\_", "_")
    change = errors(report)[0].tried[0].change
    assert re.search(rf"(tried: |Tried</dt><dd>){re.escape(change)}", text)


def test_without_advise_nothing_was_tried() -> None:
    function, x = HOPELESS["the code names the cast"]
    report = scan(Made(function), x, policy="torch-cuda", dtype="float16")
    assert not errors(report)[0].tried
    assert "(--advise tests it)" in text_of(report)


@pytest.mark.parametrize(
    ("peak", "offered"), [(1e5, True), (1e30, True), (3.38e38, True), (3.4e38, False)], ids=str
)
def test_bfloat16_is_offered_only_where_it_is_finite(peak: float, offered: bool) -> None:
    """The largest bfloat16 is 3.3895e38, the largest float32 3.4028e38."""
    report = scan(Made(lambda x: x * 1.0 * 0.5), torch.full((2, 4), peak), policy="half", dtype="float16")
    found = [f for f in errors(report) if f.code == "AMP101"]
    assert any("bfloat16" in f.advice for f in found) is offered


def flushed_determinant(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.unbind(-1)
    return (1 / (a * c - b * b)).sum(-1)


FLUSHED: dict[str, Function] = {
    "determinant": flushed_determinant,
    "reciprocal of a square": lambda x: (x * x).reciprocal(),
    "division by a product": lambda x: x[..., :1] / (x[..., 1:2] * x[..., 2:]),
    "inverse root of a square": lambda x: torch.rsqrt(x.square()),
    "logarithm of a product": lambda x: (x * x).log(),
    "normalization": lambda x: x / x.square().sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", sorted(FLUSHED))
def test_what_is_kept_in_float32_reaches_up_to_what_was_flushed(name: str) -> None:
    """Squares of 1e-4 are zero in float16, so that float32 behind them is too late."""
    x = torch.rand(16, 3, generator=torch.Generator().manual_seed(0)) * 4e-5 + 8e-5
    x[:, 1] *= 0.3
    report = advised(FLUSHED[name], x)
    first = errors(report)[0]
    rules = [trial for trial in first.tried if trial.kind == "rule"]
    assert [trial.outcome for trial in rules] == ["cure"], first.tried
    assert "square" in rules[0].change or "mul" in rules[0].change or "ops" in rules[0].change


@pytest.mark.parametrize("loss", [nn.BCELoss(), torch.nn.functional.binary_cross_entropy])
def test_a_rule_is_not_offered_for_what_autocast_refuses(loss: Function) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.sigmoid, self.loss = nn.Linear(8, 1), nn.Sigmoid(), loss

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(self.sigmoid(self.inner(x)), y)

    report = scan(Model(), (torch.randn(4, 8), torch.rand(4, 1)), policy="torch-cuda", advise=True)
    (found,) = errors(report)
    assert found.code == "AMP601"
    assert "cure" not in [trial.outcome for trial in found.tried]
    assert report.combined is None


def test_errors_after_those_that_were_tried_say_so() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.exp(row) for row in x)

    report = scan(Rows(), torch.full((10, 4), 20.0), policy="half", advise=True)
    assert [bool(found.tried) for found in errors(report)] == [True] * 8 + [False] * 2
    last = "(not tried by itself; --advise tries the first 8 errors)"
    assert [last in found.advice for found in errors(report)] == [False] * 8 + [True] * 2
    assert text_of(report).count(last) == 2
