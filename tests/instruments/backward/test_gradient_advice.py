"""Advice about gradients: one finding per cure, the cure holds in a run, and no two sentences disagree."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.findings.finding import Finding
from ampaudit.render.render import as_file
from ampaudit.report.gradients import ScaleAdvice
from tests.support.training.cases import WIDTH, Stack, Towers, classes, rows


class Branches(nn.Module):
    """Three layers side by side, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(branch(x) for branch in self.branches)


class Normalized(nn.Module):
    """CUDA autocast computes the norm in float32, between two layers in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


class Detour(torch.autograd.Function):
    """The identity, whose backward multiplies by small numbers and then by a large one."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> torch.Tensor:
        return gradient * 1e-4 * 1e-4 * 1e4 * 1e4


class Detoured(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        detoured: torch.Tensor = Detour.apply(x)  # type: ignore[no-untyped-call]
        return detoured


def tiny(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean() * 1e-7


def huge(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([tiny(output) for output in outputs]).sum() * 1e15


def scaled(factor: float, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return huge(outputs) * factor


def of_outputs(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([tiny(output) for output in outputs]).sum()


def scanned(
    model: nn.Module, loss: Callable[..., torch.Tensor], scale: float | None = 1.0, policy: str = "torch-cuda"
) -> ampaudit.Report:
    torch.manual_seed(0)
    return ampaudit.scan(model, rows(), policy=policy, backward=True, loss=loss, loss_scale=scale)


def of_code(report: ampaudit.Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def powers(text: str) -> list[int]:
    return [int(exponent) for exponent in re.findall(r"2\^(-?\d+)", text)]


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_gradients_that_one_scale_cures_are_one_finding(policy: str) -> None:
    model = Branches()
    report = scanned(model, of_outputs, policy=policy)
    (finding,) = of_code(report, "AMP702")
    assert report.verdict == "fail"
    assert "; the same begins at branches.1/linear, branches.0/linear" in finding.cause
    zero = {
        site.site for site in report.sites
        if site.gradient is not None and site.gradient.low_precision and site.gradient.flushed == 1.0
    }  # fmt: skip
    assert len(zero) >= 3
    assert zero == {finding.site, *finding.poisons}
    assert f"poisons gradients of {len(zero) - 1} more sites" in as_text(report)
    low, high = powers(finding.advice)
    for scale in (low, high):
        cured = scanned(model, of_outputs, 2.0**scale, policy)
        assert cured.verdict == "pass"
        assert not of_code(cured, "AMP702")
    assert of_code(scanned(model, of_outputs, 2.0 ** (high + 1), policy), "AMP701")


def as_text(report: ampaudit.Report) -> str:
    return " ".join(as_file(report, "text").split())


def test_a_gradient_that_vanished_before_an_op_in_float32_is_no_second_cause() -> None:
    report = scanned(Normalized(), tiny)
    (finding,) = of_code(report, "AMP702")
    assert finding.site == "head/linear"
    assert "first/linear" in finding.poisons
    assert "begins" not in finding.cause


def test_values_that_vanish_inside_a_backward_are_not_called_rounding_of_its_result() -> None:
    """Rounding would keep the gradient: the window includes the scale, and a larger one does help."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().pow(2).mean()

    model = Stack(Detoured())
    report = scanned(model, loss, policy="half")
    (finding,) = of_code(report, "AMP702")
    assert finding.evidence.peak is not None
    assert finding.evidence.peak > 2.0**-24
    assert "although it reaches" in finding.cause
    assert "rounds" not in finding.cause
    assert "no loss scale" not in finding.advice
    (highest,) = powers(finding.advice)
    assert not of_code(scanned(model, loss, 2.0**highest, "half"), "AMP702")


def test_without_a_scale_of_at_least_one_none_is_suggested() -> None:
    model = Branches()
    report = scanned(model, huge)
    (finding,) = of_code(report, "AMP701")
    assert "; under this scale, loss/to#3, loss/to overflow too" in finding.cause
    assert "in float32" not in finding.advice  # which would cure one of several
    (divisor,) = powers(finding.advice.partition("divide the loss by")[2])
    for factor, broken in ((2.0**-divisor, False), (2.0 ** (1 - divisor), True)):
        smaller = scanned(model, partial(scaled, factor))
        assert bool(of_code(smaller, "AMP701")) == broken
    assert report.backward is not None
    assert report.backward.suggested is None
    text = as_text(report)
    assert "; use 2^" not in text
    assert "all are below 1" in text
    assert "; use 2^" not in as_file(report, "html")


@pytest.mark.parametrize(
    ("low", "high", "suggested"),
    [(-20, 16, 15), (3, 3, 3), (-5, 0, 0), (-20, -1, None), (5, 4, None), (-1, 1, 0)],
)
def test_the_suggested_scale_suits_and_is_at_least_one(low: int, high: int, suggested: int | None) -> None:
    assert ScaleAdvice(0.05, (), (), low, high, "", "").suggested == suggested


def test_the_scale_that_fits_one_op_is_not_said_to_fit_the_model() -> None:
    model = Towers(1e-12, 1e2)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.pow(2).mean()

    (finding,) = of_code(scanned(model, loss, None), "AMP701")
    here, whole = powers(finding.advice)
    assert whole < here
    assert not of_code(scanned(model, loss, 2.0**whole), "AMP701")
    assert of_code(scanned(model, loss, 2.0 ** (whole + 1)), "AMP701")


def test_the_layer_to_keep_in_float32_holds_the_gradient() -> None:
    """The loss, whose backward makes the gradient, is in float32 already."""

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        model[1].weight.fill_(1e-3)
    x = torch.full((1, WIDTH), 1e-3)
    report = ampaudit.scan(
        model, x, policy="torch-cuda", backward=True, loss=lambda output: output.float().sum() * 7e4,
        loss_scale=1.0,
    )  # fmt: skip
    (finding,) = of_code(report, "AMP701")
    assert finding.layer == "loss"
    assert "divide the loss by 2^1 (2), or keep layer '1' in float32" in finding.advice


def test_one_parameter_requires_no_gradient() -> None:
    model = Stack()
    model.first.bias.requires_grad_(False)
    assert "1 parameter requires no gradient" in as_text(scanned(model, classes))
    model.first.weight.requires_grad_(False)
    assert "2 parameters require no gradient" in as_text(scanned(model, classes))


@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_the_table_of_layers_names_a_parameter_as_findings_do(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    report = ampaudit.scan(model, rows(), policy=policy, backward=True, loss=tiny)
    assert report.backward is not None
    assert report.backward.advice is not None
    parameters = {name for name, _ in model.named_parameters()}
    others = {site.site for site in report.sites if site.role != "weight-cast"}
    names = {layer.high_at for layer in report.backward.advice.layers}
    assert names <= parameters | others
    assert names & parameters
