"""The table of decisions on values says only what was repeated with the values of 16 bits."""

from __future__ import annotations

import math

import torch
from torch import nn

from ampaudit import scan
from ampaudit.views.scan_tables import path_sections
from tests.support.wrap import Wrap


def outside(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.a(1 - x) if math.sqrt(x.mean().item()) < math.sqrt(0.3001) else m.a(x)


def test_a_number_that_nothing_follows_is_not_said_to_decide_the_same_way() -> None:
    report = scan(Wrap(outside, a=nn.Linear(8, 4)).eval(), torch.full((8,), 0.30016), policy="half")
    shown = str(list(path_sections(report, 5)))
    assert "follows FP32's number" in shown
    assert "the same way" not in shown
