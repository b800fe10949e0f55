"""What a model's Python code reads of values along a path: each way of reading, and what depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling, is_exporting

from ampaudit import scan
from ampaudit.core.session import Session
from tests.support.eager import agrees_with_eager, model_of, numbers
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


def repeated_in_a_trace(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([x, x]) if torch.compiler.is_compiling() or torch.compiler.is_exporting() else x
    return m.a(x) * rows


def asked_by_other_names(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    questions = (
        is_compiling,
        is_exporting,
        torch._dynamo.is_compiling,
        torch.fx._symbolic_trace.is_fx_tracing,
    )
    rows = torch.cat([x, x]) if any(asked() for asked in questions) else x
    return m.a(x) * rows


def asked_through_a_function(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def is_traced() -> bool:
        return is_compiling() or torch.jit.is_tracing()

    return m.a(x) * torch.cat([x] * (1 + is_traced()))


def asked_of_a_tensor(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fake = isinstance(x, getattr(torch, "_subclasses").FakeTensor)  # noqa: B009
    return m.a(x) * (torch.cat([x, x]) if fake else x)


def asked_by_an_import(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    return m.a(x) * (torch.cat([x, x]) if isinstance(m.a.weight, FakeTensor) else x)


def heads_shared_outside_a_trace(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    query = m.a(x).view(2, 4, 1, 2)
    shared = not torch.compiler.is_exporting()
    key = query if shared else query.repeat_interleave(2, dim=1)
    return nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=shared).view(2, 8)


def kernel_with_a_strict_description(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([1, 2], dtype=torch.int32)
    experts = torch.stack([m.a.weight.T, -m.a.weight.T])
    return nn.functional.grouped_mm(m.a(x) if x.sum() > 0 else x, experts, offs=ends)


@pytest.mark.parametrize(
    "function",
    [
        *(least, tensor_of_list, only_a_size, whole, inside_a_kernel, new_tensor),
        *(lists_of_positions, repeated_in_a_trace, asked_by_other_names, asked_through_a_function),
        *(asked_of_a_tensor, asked_by_an_import, heads_shared_outside_a_trace),
        kernel_with_a_strict_description,
    ],
)
def test_values_are_those_of_the_model(function: Callable[..., Any]) -> None:
    model, x = model_of(function), torch.arange(-3.5, 12.5).reshape(2, 8) / 4
    kept: dict[str, Any] = {}
    report = scan(model, x, policy="half", session=Session(keep_outputs=lambda _, found: kept.update(found)))
    assert report.verdict == "pass"
    ((reference, _),) = kept.values()
    assert torch.equal(reference, model(x))


@pytest.mark.parametrize(
    "asked",
    [
        is_compiling,
        is_exporting,
        lambda: torch.fx._symbolic_trace.is_fx_tracing(),
        lambda: int(is_compiling()),
        lambda: is_exporting() == True,  # noqa: E712
        lambda: {True: 1, False: 0}[is_compiling()],
        lambda: f"{is_compiling()}" == "True",
        lambda: False | is_compiling(),
        lambda: is_compiling() & True,
        lambda: is_exporting() ^ False,
        lambda: is_compiling() + is_exporting() > 0,
        lambda: max(is_compiling(), False),
    ],
)
def test_code_that_asks_whether_it_is_traced_is_told_no(asked: Callable[[], bool]) -> None:
    report = agrees_with_eager(model_of(lambda m, x: m.a(x) * (1 if asked() else 2)), numbers(2, 8))
    assert report.path is None


def test_code_without_a_graph_is_left_out_where_the_model_asks() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not is_compiling() and not bool(x.isfinite().all()):
            raise ValueError
        return m.a(x)

    report = agrees_with_eager(model_of(forward), numbers(2, 8))
    assert report.path is None


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
        (lambda x: torch.allclose(x, x * 1.0002, rtol=1e-4, atol=0.0), True),
        (lambda x: torch.allclose(x, x * 1.01, rtol=0.1), False),
    ],
)
def test_what_python_makes_of_a_number_decides(decide: Callable[[torch.Tensor], Any], flips: bool) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.a(x) * decide(x)

    x = torch.full((2, 8), 0.5)
    assert (decide(x) != decide(x.half())) == flips
    report = scan(Wrap(forward, a=nn.Linear(8, 8)).eval(), x, policy="half")
    assert ("AMP214" in {finding.code for finding in report.findings}) == flips
