"""What a model's Python code reads of values along a path: each way of reading, and what depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit import scan
from tests.support.eager import model_of
from tests.support.wrap import Wrap


def least(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * (min(x[0]) + max(len(x), 3) + max(x[0]).item())


def tensor_of_list(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parts = [row.sum() for row in x if row.sum() > -100]
    return m.a(x) + torch.tensor([[part, 1] for part in parts]).sum()


def only_a_size(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * len(x[x > 0])


def whole(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * int(x.abs().sum()) * float(x.abs().max())


def inside_a_kernel(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.sum() == 0:
        return x
    return m.a(x) * nn.functional.one_hot(x.long().abs()).shape[-1]


def new_tensor(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.sum() == 0:
        return x
    return m.a(x) * x.new_tensor([x.max() / 3, 2.0]).sum()


def lists_of_positions(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows, columns = zip(*(x > 1).nonzero(), strict=True)
    x = x.clone()
    x[rows, columns] = 0.5
    return m.a(x) + x[rows[:2], columns[:2]].sum()


def asks_whether_it_is_traced(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        raise RuntimeError("not for a trace")
    return m.a(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "function",
    [
        *(least, tensor_of_list, only_a_size, whole, inside_a_kernel, new_tensor),
        *(lists_of_positions, asks_whether_it_is_traced),
    ],
)
def test_values_are_those_of_the_model(function: Callable[..., Any]) -> None:
    model, x = model_of(function), torch.arange(-3.5, 12.5).reshape(2, 8) / 4
    kept: dict[str, Any] = {}
    report = scan(model, x, policy="half", keep_outputs=lambda _, found: kept.update(found))
    assert report.verdict == "pass"
    ((reference, _),) = kept.values()
    assert torch.equal(reference, model(x))


def test_an_overflow_that_only_decides_a_size_is_found() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        far = x.square() * 2e5
        return m.a(x) * len(x[far > far.mean()])

    found = scan(model_of(forward), torch.linspace(0, 1, 8)[None], policy="half").findings
    assert {f.source.code for f in found if f.severity == "error" and f.source} >= {"far = x.square() * 2e5"}


@pytest.mark.parametrize(
    ("decide", "flips"),
    [
        (lambda x: bool(x.sum() * 1e-9), True),
        (lambda x: bool((x > 0.5).sum()), False),
        (lambda x: int(x.sum() + 2048.4 - x.sum()), False),
        (lambda x: int(x.mean() + 0.49995), True),
        (lambda x: float(x.mean()) > 0, False),
    ],
)
def test_what_python_makes_of_a_number_decides(decide: Callable[[torch.Tensor], Any], flips: bool) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.a(x) * decide(x)

    x = torch.full((2, 8), 0.5)
    report = scan(Wrap(forward, a=nn.Linear(8, 8)).eval(), x, policy="half")
    assert ("AMP214" in {finding.code for finding in report.findings}) == flips
