"""Sites keep their decisions along every path that batches take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampaudit
from tests.support.wrap import Wrap


def two_products(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 0:
        x = x @ m.a.weight / 4
    return x * 400 @ (m.b.weight * 400) / 60


def model() -> nn.Module:
    made = Wrap(two_products, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    for weight in (made.a.weight, made.b.weight):
        nn.init.eye_(weight)
    return made


def batches() -> list[torch.Tensor]:
    first = torch.full((4, 8), 0.5)
    second = first.clone()
    second[0, 0] = -1
    return [first, second]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_measured_rule_promotes_the_op_that_was_measured(reverse: bool) -> None:
    order = batches()[::-1] if reverse else batches()
    report = ampaudit.scan(model(), batches=[(x,) for x in order])
    assert report.path is not None
    assert report.path.count == 2
    assert [f.code for f in report.findings if f.severity == "error"] == []
    promoted = {
        s.site for s in report.sites if s.rule == "ampaudit/overflow" and s.op == "aten.matmul.default"
    }
    (expected,) = {
        s.site for s in report.sites if s.op == "aten.matmul.default" and s.forward and s.forward.peak > 60000
    }
    assert promoted == {expected}


def test_advice_about_one_path_reaches_its_op_in_the_other() -> None:
    report = ampaudit.scan(model(), batches=[(x,) for x in batches()], policy="half", advise=True)
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert [trial.outcome for trial in finding.tried if trial.kind == "rule"] == ["cure"]
