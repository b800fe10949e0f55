"""AMP106 names the power that leaves the range; the limit it states is where the power does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import ampaudit
from tests.support.wrap import Wrap, linear

# what is made of x, the power, and how the finding says it
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, str]] = {
    "x * x": (lambda x: x * x, 2, "squares its input"),
    "square": (torch.square, 2, "squares its input"),
    "x * x * x": (lambda x: x * x * x, 3, "cubes its input"),
    "x * square": (lambda x: x.view(-1) * x.square().view(-1), 3, "cubes its input"),
    "pow 3": (lambda x: x.pow(3), 3, "cubes its input"),
    "x ** 4": (lambda x: x**4, 4, "raises its input to the power 4"),
    "square of a square": (lambda x: (x * x).square(), 4, "raises its input to the power 4"),
    "pow 2.5": (lambda x: x.abs() ** 2.5, 2.5, "raises its input to the power 2.5"),
    "eighth": (lambda x: ((x * x) ** 2).square(), 8, "raises its input to the power 8"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_power_and_its_limit(name: str) -> None:
    function, power, says = CASES[name]
    limit = 65504 ** (1 / power)
    for factor, breaks in ((1.1, True), (0.9, False)):
        report = ampaudit.scan(
            Wrap(lambda m, x: function(x) * m.a.bias[0], a=linear()).eval(),
            torch.full((4, 8), limit * factor),
            policy="half",
        )
        found = [f for f in report.findings if f.code == "AMP106" and f.severity == "error"]
        assert bool(found) is breaks
        if found:
            assert f"the op {says}, and" in found[0].cause
            (stated,) = re.findall(r"and ([\d.]+) ", found[0].cause)
            assert float(stated) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize(
    ("function", "says"),
    [(lambda x: x.square(), "adds up squares"), (lambda x: x * x * x, "adds up cubes")],
)
def test_sums_of_powers(function: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    model = Wrap(lambda m, x: function(x).sum(-1) * m.a.bias[0], a=linear()).eval()
    report = ampaudit.scan(model, torch.full((2, 512), 25.0), policy="half")
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP106"]
    assert says in report.findings[0].cause


def test_a_product_of_two_values_is_no_power() -> None:
    model = Wrap(lambda m, x: (x + m.a.bias) * (x + 200.0), a=linear()).eval()
    report = ampaudit.scan(model, torch.full((4, 8), 300.0), policy="half")
    assert "AMP106" not in {f.code for f in report.findings}


def test_a_cast_of_a_square_is_no_square() -> None:
    """CUDA's autocast computes the square in float32; the cast before the layer overflows."""
    model = Wrap(lambda m, x: m.a(x.pow(2)), a=linear()).eval()
    report = ampaudit.scan(model, torch.full((4, 8), 300.0), policy="torch-cuda")
    (found,) = (f for f in report.findings if f.severity == "error")
    assert (found.code, found.op) == ("AMP101", "aten.to.dtype")
    assert "casts this input" in found.cause


def test_a_multiple_of_a_power_is_no_exponential() -> None:
    model = Wrap(lambda m, x: (x * m.a.bias[0]).pow(2) * 2 / 1e4, a=linear()).eval()
    torch.nn.init.ones_(model.a.bias)
    inputs = torch.tensor([[200.0, 300.0]])  # twice the square of the first leaves the range as well
    report = ampaudit.scan(model, inputs, policy="half")
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP106", "AMP101"]
