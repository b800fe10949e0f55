"""Faults that an op hides as finite values, and that break a later op; real float16 is the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.report.model import Report

# squares of 300 are infinite in float16, those of 1 are right
X = torch.linspace(100, 600, 32).reshape(4, 8)

COME_BACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logarithm of a reciprocal": lambda x: (1 / (x * x)).log(),
    "inverse root of a quotient": lambda x: (x / (x * x)).square().rsqrt(),
    "logarithm of an exponential": lambda x: torch.exp(-(x * x) * 2e-5).log(),
    "logarithm of a sigmoid": lambda x: torch.sigmoid(-(x * x) * 2e-5).log(),
    "inverse of tanh": lambda x: torch.atanh(torch.tanh(x * x * 8e-6)),
    "zero by zero": lambda x: (1 / (x * x)) / (2 / (x * x)),
    "power of a reciprocal": lambda x: (1 / (x * x)).pow(-0.25),
    "through a view and a sum": lambda x: (1 / (x * x)).reshape(8, 4).T.contiguous().log().sum(-1),
}


class Function(nn.Module):
    """A function as a module with a weight, so that nothing in it counts as a mask."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def audited(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Report:
    return scan(Function(function).eval(), x, policy="half", dtype="float16")


@pytest.mark.parametrize("name", sorted(COME_BACK))
def test_the_origin_of_what_breaks_later_is_an_error(name: str) -> None:
    function = COME_BACK[name]
    assert not function(X.half()).isfinite().all()
    assert function(X).isfinite().all()
    found = [f for f in audited(function, X).findings if f.origin and f.severity == "error"]
    assert found
    assert all(f.code in {"AMP101", "AMP106"} and "/mul" in f.site for f in found)
    assert all(f.fate == "reaches the output" and f.poisons for f in found)


@pytest.mark.parametrize("name", sorted(COME_BACK))
def test_without_an_overflow_nothing_breaks(name: str) -> None:
    function, x = COME_BACK[name], X / 100
    assert function(x.half()).isfinite().all()
    assert not [f for f in audited(function, x).findings if f.origin]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x * x).clamp(max=6.0), id="clamp"),
        pytest.param(lambda x: torch.sigmoid(x * x), id="sigmoid"),
        pytest.param(lambda x: torch.tanh(x * x), id="tanh"),
    ],
)
def test_what_is_hidden_for_good_is_a_note(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = [f for f in audited(function, X).findings if f.origin]
    assert {f.severity.value for f in found} == {"note"}


class Chosen(nn.Module):
    """Limits a square, or scales it, as an input says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, limited: torch.Tensor) -> torch.Tensor:
        square = (x * self.weight).square()
        return torch.where(limited > 0, square.clamp(max=6.0), square / 1e5)


@pytest.mark.parametrize("order", [(1.0, -1.0), (-1.0, 1.0), (1.0, 1.0, -1.0)])
def test_an_origin_is_judged_by_the_batch_in_which_it_harms(order: tuple[float, ...]) -> None:
    batches = [(X, torch.tensor([sign])) for sign in order]
    report = scan(Chosen().eval(), batches=batches, policy="half", dtype="float16")
    (found,) = (f for f in report.findings if f.origin)
    assert found.severity == "error"
    assert found.fate == "reaches the output"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda y: y[:, ::2],
    "row": lambda y: y[-1],
    "flat": lambda y: y.view(-1),
    "transposed": lambda y: y.t(),
    "chunk": lambda y: y.chunk(2)[1],
    "view of a view": lambda y: y[:, ::2].select(1, 0),
}
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda y: y.clamp(max=6.0),
    "sum": lambda y: (y / 1e4).sum(-1),
    "another view": lambda y: y.t()[0].contiguous() + 1,
    "nothing": lambda y: y,
    "overwritten": lambda y: y.zero_() + 1,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reader", READERS)
def test_a_write_through_a_view_is_followed_to_what_reads_its_base(view: str, reader: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        VIEWS[view](y).square_()
        return READERS[reader](y)

    harms = not function(X.half()).isfinite().all()
    (found,) = (f for f in audited(function, X).findings if f.origin)
    assert found.severity == ("error" if harms else "note")
    assert found.site == "(top)/pow_"
    poisoned = {"sum": {"div", "sum"}, "another view": {"add#2"}}
    assert {site.partition("/")[2] for site in found.poisons} == poisoned.get(reader, set())


def test_what_another_part_of_a_written_tensor_gives_is_right() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        y[:, ::2].square_()
        return y[:, 1::2].mean() + (y[:, 1::2] * 1e-3).square().sum()

    report = audited(function, X)
    assert {f.severity.value for f in report.findings if f.origin} == {"note"}
    assert report.exit_code == 0


def test_an_op_that_writes_to_a_16_bit_tensor_is_not_promoted() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, torch.eye(8, dtype=x.dtype))
        y.square_()
        return y / 1e5

    report = scan(Function(function).eval(), X)
    assert "(top)/pow_" not in report.promoted
    (found,) = (f for f in report.findings if f.origin and f.site == "(top)/pow_")
    assert "casts the op's inputs to float32 but not its result" in found.cause


def test_many_broken_writes_to_parts_of_a_tensor_are_followed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(250, *x.shape)
        for number in range(250):
            y[number] = x * x
        return y.sum(0)

    report = audited(function, X)
    assert {f.code for f in report.findings if f.origin} == {"AMP106"}
    assert report.exit_code == 1
