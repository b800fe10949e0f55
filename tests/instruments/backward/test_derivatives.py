"""Derivatives that are formulas of several ops round as often as torch's own do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from tests.support.wrap import Wrap

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# each with the size of its operands, and whether its derivative leaves the range of float16
CASES: dict[str, tuple[Function, float, bool]] = {
    "acos": (lambda w, x: torch.acos(w), 0.5, False),
    "acosh": (lambda w, x: torch.acosh(w.abs() + 2), 100, False),
    "addcdiv": (lambda w, x: torch.addcdiv(x, torch.ones_like(x), w, value=1e-5), 2e-4, True),
    "addmm": (lambda w, x: 100 * torch.addmm(0 * x[:, :4], w, x.T, alpha=1e-5), 1000, True),
    "asin": (lambda w, x: torch.asin(w), 0.5, False),
    "asinh": (lambda w, x: torch.asinh(w), 10, False),
    "atan": (lambda w, x: torch.atan(w), 10, False),
    "atan2": (lambda w, x: torch.atan2(w, x), 10, False),
    "atanh": (lambda w, x: torch.atanh(w), 0.5, False),
    "baddbmm": (
        lambda w, x: 100 * torch.baddbmm((0 * x[:, :4])[None], w[None], x.T[None], alpha=1e-5),
        1000,
        True,
    ),
    "binary_cross_entropy": (lambda w, x: F.binary_cross_entropy(1 - w, torch.ones_like(x)), 1e-5, True),
    "binary_cross_entropy_with_logits": (
        lambda w, x: (
            F.binary_cross_entropy_with_logits(w, torch.ones_like(x), pos_weight=9 + 0 * x[0]).float() * 2e4
        ),
        1e-3,
        True,
    ),
    "cumprod": (lambda w, x: 1000 * torch.cat([w[:, :1], torch.ones_like(x)], 1).cumprod(-1), 40, True),
    "div": (lambda w, x: torch.ones_like(x) / w * 1e-5, 3e-3, True),
    "hypot": (lambda w, x: torch.hypot(w, x), 100, False),
    "linalg_vector_norm": (lambda w, x: torch.linalg.vector_norm(w, 4, dim=-1), 300, True),
    "mse_loss": (
        lambda w, x: F.mse_loss(w.repeat(5000, 1), (w.detach() * 0.999).repeat(5000, 1)).float() * 1e4,
        0.5,
        False,
    ),
    "mul": (lambda w, x: (w[0] * x.repeat(5000, 1)).float() * 1e-7, 0.1, False),
    "norm": (lambda w, x: torch.norm(w, 3, dim=-1), 1000, True),
    "pow": (lambda w, x: w.abs().pow(-0.5) * 1e-4, 1e-4, True),
    "reciprocal": (lambda w, x: w.reciprocal() * 1e-5, 1e-3, True),
    "rsqrt": (lambda w, x: w.abs().rsqrt() * 1e-4, 1e-4, True),
    "sqrt": (lambda w, x: w.abs().sqrt(), 1e-3, False),
    "std": (lambda w, x: w.std(-1), 100, False),
    "std_mean": (lambda w, x: torch.std_mean(w, -1)[0] * 20, 2e-4, True),
    "tan": (lambda w, x: torch.tan(w) * 1e-3, 1, False),
    "var": (lambda w, x: w.var(-1), 10, False),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_leave_the_range_where_those_of_torch_do(name: str) -> None:
    function, size, broken = CASES[name]
    torch.manual_seed(0)
    weight, x = ((0.3 + torch.rand(4, 8)) * size for _ in range(2))
    model: Any = Wrap(lambda m, x: function(m.a.weight, x), a=nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        model.a.weight.copy_(weight)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().sum()

    half: Any = copy.deepcopy(model).half()
    loss(half(x.half())).backward()
    loss(model(x)).backward()
    expected, exact = half.a.weight.grad.float(), model.a.weight.grad
    model.zero_grad()
    report = ampaudit.scan(model, x, policy="half", backward=True, loss=loss, loss_scale=1.0)
    assert report.backward is not None
    assert bool(exact.abs().max() < 60000)
    assert broken != bool(expected.isfinite().all())
    origins = [finding for finding in report.findings if finding.code == "AMP701"]
    assert bool(origins) == broken
    if broken:
        assert "no loss scale cures it" in origins[0].advice
        return
    (row,) = report.backward.parameters
    accuracy = 10 * torch.log10(exact.square().sum() / (exact - expected).square().sum())
    assert row.gradient.sqnr_db == pytest.approx(float(accuracy), abs=4)


UNDERIVED: dict[str, Function] = {
    "the shape of a class weight": lambda w, x: F.cross_entropy(
        w, torch.arange(4), weight=torch.ones_like(w[0])
    ),
    "a sign": lambda w, x: torch.sgn(w) * w,
    "random slopes": lambda w, x: F.rrelu(w - x, training=True),
}


@pytest.mark.parametrize("name", UNDERIVED)
@pytest.mark.parametrize("sensitivity", [False, True])
def test_gradients_pass_around_what_has_none(name: str, sensitivity: bool) -> None:
    torch.manual_seed(0)
    function = UNDERIVED[name]
    model: Any = Wrap(lambda m, x: function(m.a.weight, x), a=nn.Linear(8, 4, bias=False))
    x = torch.randn(4, 8)
    report = ampaudit.scan(
        model,
        x,
        policy="half",
        backward=True,
        sensitivity=sensitivity,
        loss=lambda y: y.mean(),
        loss_scale=1.0,
    )
    assert report.verdict == "pass"
    assert report.backward is not None
    (row,) = report.backward.parameters
    if name != "random slopes":
        model(x).mean().backward()
        assert row.gradient.peak == pytest.approx(float(model.a.weight.grad.abs().max()), rel=1e-5)


def test_no_loss_scale_suits_a_norm_of_small_values_in_half() -> None:
    """The derivative of ``rsqrt`` cubes its result, which float16 holds up to 40."""

    def normalized(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        result: torch.Tensor = m.b(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5))
        return result

    torch.manual_seed(0)
    model = Wrap(normalized, a=nn.Linear(16, 16, bias=False), b=nn.Linear(16, 4))
    x = torch.randn(32, 16) * 0.02
    half: Any = copy.deepcopy(model).half()
    half(x.half()).float().square().mean().backward()
    assert not half.a.weight.grad.isfinite().any()
    for scale in (1.0, 1024.0):
        report = ampaudit.scan(
            model, x, policy="half", backward=True, loss=lambda y: y.float().square().mean(), loss_scale=scale
        )
        assert [f.op for f in report.findings if f.code == "AMP701"] == ["aten.rsqrt.default"]
        assert report.exit_code == 1
