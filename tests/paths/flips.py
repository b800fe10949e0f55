"""Decisions of Python that float16 takes differently, and the same ones with room to spare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.wrap import Wrap


def branch(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 2048:  # DECIDED
        x = x / 2048
    return m.a(x / 64)


def whole_number(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    many = int(x.square().sum())  # DECIDED
    return m.a(x).repeat(many, 1)


def item(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.mean().item() < 0.3001:  # DECIDED
        x = 1 - x
    return m.a(x)


def nonzero_count(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = (x > 1).nonzero()  # DECIDED
    return m.a(x).sum() * len(rows)


def loop(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    steps = 0
    while x.max() < 8:  # DECIDED
        x, steps = x * 2, steps + 1
    return m.a(x) * steps


def index(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer = (m.a, m.b)[int(x[:2].argmax())]  # DECIDED
    return layer(x / 1024)


@dataclass(frozen=True)
class Decision:
    """A model, an input at which float16 decides otherwise, and one at which it does not."""

    function: Callable[[nn.Module, torch.Tensor], Any]
    flips: list[float]
    holds: list[float]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Wrap(self.function, a=nn.Linear(8, 4), b=nn.Linear(8, 4)).eval()

    @staticmethod
    def inputs(values: list[float]) -> torch.Tensor:
        return torch.nn.functional.pad(torch.tensor(values), (0, 8 - len(values)), value=0.25)

    @property
    def line(self) -> tuple[str, int]:
        lines, first = inspect.getsourcelines(self.function)
        number = next(n for n, line in enumerate(lines, first) if re.search("# DECIDED", line))
        return inspect.getfile(self.function), number


DECISIONS = {
    "branch": Decision(branch, [2047.0, -0.1], [2047.0, 3.0]),
    "whole_number": Decision(whole_number, [1.346198, 1.346198], [1.5, 1.5]),
    "item": Decision(item, [0.30016] * 8, [0.29] * 8),
    "nonzero_count": Decision(nonzero_count, [1.0001, 2.0], [1.01, 2.0]),
    "loop": Decision(loop, [0.99999, 0.5], [0.98, 0.5]),
    "index": Decision(index, [2048.0, 2049.0], [2048.0, 2060.0]),
}
