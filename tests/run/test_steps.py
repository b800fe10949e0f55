"""Audits over several steps against loops that are written by hand: run eagerly, and rounded op by op."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import AuditError
from tests.support.steps import half, scanned

WIDTH = 8


class Growing(nn.Module):
    """A recurrent state that grows by a constant factor, and something computed beside it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner.weight = nn.Parameter(torch.eye(WIDTH) * factor)
        self.side = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.inner(state)
        return self.side(torch.tanh(state) + x), state


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the line of a function that holds a text."""
    code = function.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    found = (i for i in range(code.co_firstlineno - 1, len(lines)) if text in lines[i])
    return next(found) + 1


def test_an_overflow_at_step_40_is_named_with_layer_and_line() -> None:
    model, state = Growing(1.2), torch.linspace(20.0, 50.0, 2 * WIDTH).reshape(2, WIDTH)
    weight, expected, value = half(model.inner.weight.detach()), 0, half(state)
    for step in range(1, 51):  # by hand: products are exact in float32, and one is not zero in each row
        value = half(value @ weight.T)
        if not expected and not value.isfinite().all():
            expected = step
    assert expected == 40
    report, _ = scanned(model, (torch.zeros(2, WIDTH), state), 50)
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.code, finding.layer, finding.evidence.step) == ("AMP101", "inner", expected)
    assert finding.source is not None
    assert finding.source.line == line_of(Growing.forward, "self.inner(state)")
    assert report.steps is not None
    first = report.steps.first_broken
    assert first is not None
    assert (first.step, first.origins) == (expected, ("inner/linear",))
    assert not any(step.poisoned for step in report.steps.steps[:expected])
    assert all(step.poisoned for step in report.steps.steps[expected:])


def test_the_16_bit_run_carries_its_own_state() -> None:
    model, state = Growing(1.0371), torch.rand(2, WIDTH, generator=torch.manual_seed(1))
    report, kept = scanned(model, (torch.zeros(2, WIDTH), state), 20)
    weight, own, fp32 = half(model.inner.weight.detach()), half(state), state
    for outputs in kept:
        own, fp32 = half(own @ weight.T), fp32 @ model.inner.weight.detach().T
        reference, value = outputs["output[1]"]
        assert torch.equal(value.float(), own)
        assert torch.equal(reference, fp32)
    assert len(kept) == 20
    assert report.steps is not None
    errors = [step.accuracy_db for step in report.steps.steps]
    expected = 10 * math.log10(float(fp32.double().square().sum() / (own - fp32).double().square().sum()))
    assert errors[-1] == pytest.approx(expected, abs=0.01)


def test_a_healthy_state_grows_not() -> None:
    report, _ = scanned(Growing(0.9), (torch.zeros(2, WIDTH), torch.ones(2, WIDTH)), 20)
    assert report.verdict == "pass"
    assert report.steps is not None
    assert report.steps.growth == ()
    assert report.steps.first_broken is None


@pytest.mark.parametrize("factor", [1.05, 1.2, 1.5])
def test_values_double_as_often_as_they_must(factor: float) -> None:
    report, _ = scanned(Growing(factor), (torch.zeros(2, WIDTH), torch.ones(2, WIDTH) * 1e-2), 40)
    assert report.steps is not None
    (found,) = [growth for growth in report.steps.growth if growth.what == "values"]
    assert found.doubles_every == pytest.approx(1 / math.log2(factor), rel=0.05)


class Unstable(nn.Module):
    """A fixed point from which every deviation grows by a known factor per step."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, start: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (x - start) + start * 1.0


@pytest.mark.parametrize("factor", [1.25, 1.5])
def test_errors_double_as_often_as_they_must(factor: float) -> None:
    start = torch.rand(512, generator=torch.manual_seed(2)) + 1.0
    report, _ = scanned(Unstable(factor), (start, half(start)), 16)
    assert report.steps is not None
    (found,) = [growth for growth in report.steps.growth if growth.what == "error"]
    assert found.doubles_every == pytest.approx(1 / math.log2(factor), rel=0.15)


def test_an_error_that_builds_up_is_not_the_last_steps() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pace = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.pace  # half of float16's step at 256 is 0.125: the state never moves

    report, kept = scanned(Counting(), torch.full((2, 4), 256.0), 40, min_sqnr=45.0)
    assert float(kept[-1]["output"][1][0, 0]) == 256.0
    (finding,) = [f for f in report.findings if f.code == "AMP207"]
    assert "built up over the steps" in finding.cause
    assert finding.evidence.step == 40


class Sampler(nn.Module):
    """Predicts noise that is a share of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.share * x + 0.0 * t


def next_sample(outputs: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
    x, t = inputs
    return x + 2.0 * outputs, t - 1.0


def test_a_sampler_whose_fault_comes_at_step_14_is_named_with_its_line() -> None:
    x, t = torch.full((2, 4), 5.0), torch.tensor(30.0)
    value, expected = half(x), 0
    for step in range(1, 30):
        value = half(value + half(2.0 * half(0.5 * value)))
        if not expected and not value.isfinite().all():
            expected = step
    assert expected == 14
    report, _ = scanned(Sampler(), (x, t), 20, next_inputs=next_sample)
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.code, finding.layer, finding.evidence.step) == ("AMP118", "next_inputs", expected)
    assert finding.source is not None
    assert finding.source.line == line_of(next_sample, "2.0 * outputs")
    assert report.steps is not None
    assert [step.step for step in report.steps.steps if step.poisoned] == list(range(15, 21))


def test_an_audit_of_one_step_is_the_audit_of_a_call() -> None:
    model, inputs = Growing(1.5), (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    once, _ = scanned(model, inputs, 1)
    plain = ampaudit.scan(model, inputs, policy="half")
    assert once.sites == plain.sites
    assert once.outputs == plain.outputs


BAD: tuple[tuple[Any, str], ...] = (
    (lambda outputs, inputs: None, "returned nothing after step 1"),
    (lambda outputs, inputs: (), "returned tuple after step 1"),
    (lambda outputs, inputs: "text", "returned str after step 1"),
    (lambda outputs, inputs: (1, 2), "returned no tensor after step 1"),
    (lambda outputs, inputs: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda outputs: outputs, "TypeError"),
    (lambda outputs, inputs: (inputs[0], outputs[1] * math.nan), "NaN or infinity in FP32 after step 1"),
    (lambda outputs, inputs: (inputs[0], outputs[1][:, :3]), "mat1 and mat2 shapes"),
    (lambda outputs, inputs: outputs[1], "forward"),
    (lambda outputs, inputs: {"z": outputs[1]}, "forward"),
    (17, "next_inputs is of type int"),
)


@pytest.mark.parametrize(("function", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_function_is_one_clear_line(function: Any, words: str) -> None:
    inputs = (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    with pytest.raises(AuditError) as caught:
        ampaudit.scan(Growing(1.0), inputs, steps=3, next_inputs=function)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).split("\n  next:")[0]


LOOPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "an unstable fixed point": (lambda s: 1.25 * s - 0.25 * torch.ones_like(s), 30),
    "the same, ended in time": (lambda s: 1.25 * s - 0.25 * torch.ones_like(s), 12),
    "a logistic map": (lambda s: 3.9 * (s - 0.5) * (1.5 - s) + 0.5, 25),
    "a stable logistic map": (lambda s: 2.5 * (s - 0.5) * (1.5 - s) + 0.5, 25),
    "compound interest": (lambda s: s * 1.003, 60),
    "a slow leak": (lambda s: s - 0.0005, 40),
    "a contraction": (lambda s: 0.5 * s + 0.25, 40),
    "a doubling map": (lambda s: (2 * s).remainder(1.0), 10),
    "an oscillator": (lambda s: torch.stack([s[0] + 0.3 * s[1], s[1] - 0.3 * (s[0] + 0.3 * s[1])]), 40),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_below_the_required_accuracy_fails(name: str) -> None:
    """Against a loop of PyTorch's own bfloat16."""
    step, count = LOOPS[name]

    class Loop(nn.Module):
        def forward(self, s: torch.Tensor) -> torch.Tensor:
            return step(s)

    start = torch.tensor([[1.003, 1.002, 0.999], [0.9, 1.001, 1.2]])
    exact, low, worst = start, start.bfloat16(), math.inf
    for _ in range(count):
        exact, low = step(exact), step(low)
        error = (exact - low.float()).square().sum()
        worst = min(worst, float(10 * torch.log10(exact.square().sum() / error)))
    assert abs(worst - 20) > 2  # or rounding would decide
    report, _ = scanned(Loop(), start, count, dtype="bfloat16")
    assert any(f.severity == "error" for f in report.findings) == (worst < 20), worst
