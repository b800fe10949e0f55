"""Outputs are compared with the user's own FP32 model, also where the code does something else in 16 bits.

The oracle is that model, run eagerly, and its ``.half()``: what the two return is what a report must say.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.inputs import as_source
from ampaudit.audit.scan import scan_policies
from ampaudit.core.errors import ReferenceBroken
from ampaudit.core.formats import FLOAT16
from ampaudit.findings.finding import Finding
from ampaudit.policy import load_policy
from ampaudit.report.model import Report
from ampaudit.run.config import RunConfig
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import Runner
from ampaudit.source import Batch
from ampaudit.trace import TraceConfig, trace
from ampaudit.views.verdict import verdict_words
from tests.support.wrap import Wrap, linear


class Of(nn.Module):
    """A linear layer and then a function of its output."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(16, 16)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.inner(x))


def inputs(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * scale


class Turn(nn.Module):
    """Turns complex numbers by a buffer, in code that reads a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(16, 16)
        parts = torch.randn(8, 2).to(torch.float16 if dtype is torch.complex32 else torch.float32)
        self.register_buffer("turn", torch.view_as_complex(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y = y.float() if y.dtype == torch.float16 else y
        return torch.view_as_real(torch.view_as_complex(y.reshape(-1, 8, 2)) * self.turn.to(torch.complex64))


def test_the_fp32_model_keeps_complex_numbers_in_16_bits() -> None:
    """A buffer in complex32 is widened, with its imaginary part, where the FP32 model runs eagerly."""
    expected, report = (
        scan(Turn(dtype), inputs(), policy="half") for dtype in (torch.complex64, torch.complex32)
    )
    assert report.verdict == expected.verdict == "pass"
    assert report.outputs[0].accuracy_db == pytest.approx(expected.outputs[0].accuracy_db, abs=3)


def decibel(value: torch.Tensor, fp32: torch.Tensor) -> float:
    value, fp32 = value.detach().double(), fp32.detach().double()
    error = (value - fp32).square().sum()
    return math.inf if error == 0 else float(10 * torch.log10(fp32.square().sum() / error))


def code_findings(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.code in ("AMP212", "AMP213")]


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


_CALLS: list[torch.Tensor] = []  # of models that run eagerly


def clamped(h: torch.Tensor) -> torch.Tensor:
    h = h * 3
    if h.dtype == torch.float16:
        h = h.clamp(-1, 1)  # here
    return h


def with_eps(h: torch.Tensor) -> torch.Tensor:
    h = h * 0.01
    return h / (h.norm(dim=-1, keepdim=True) ** 2 + torch.finfo(h.dtype).eps)  # here


def with_tiny(h: torch.Tensor) -> torch.Tensor:
    scaled = h.abs().amin(-1, keepdim=True) * 1e-2
    return h * scaled.clamp(min=torch.finfo(h.dtype).tiny * 100)  # here


def by_size(h: torch.Tensor) -> torch.Tensor:
    return h + 4 // h.element_size()  # here


def by_type(h: torch.Tensor) -> torch.Tensor:
    return h.sin() if h.type().endswith("HalfTensor") else h.cos()  # here


def other_ops(h: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(h) if h.dtype != torch.float32 else torch.exp(h)  # here


def passed_on(h: torch.Tensor) -> torch.Tensor:
    return _branch(h, h.dtype)


def _branch(h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return h.tanh() if dtype is torch.float16 else h


def probabilities(h: torch.Tensor) -> torch.Tensor:
    sharp = torch.distributions.Bernoulli(probs=(h * 40).sigmoid(), validate_args=False)
    return sharp.logits  # here


SPOILED = {f.__name__: f for f in (clamped, with_eps, with_tiny, by_size, by_type, other_ops, probabilities)}


@pytest.mark.parametrize("name", SPOILED)
def test_code_that_16_bits_run_alone_fails_at_its_line(name: str) -> None:
    function = SPOILED[name]
    model, x = Of(function).eval(), inputs()
    report = scan(model, x, policy="half", min_sqnr=40.0)
    truth = decibel(copy.deepcopy(model).half()(x.half()), model(x))
    assert truth < 40, "the example is broken"
    (found,) = code_findings(report)
    assert (found.code, found.severity, report.verdict) == ("AMP212", "error", "fail")
    assert found.source is not None
    assert found.source.line == line_of(function, "# here")
    assert f"{truth:.0f} dB against FP32" in found.cause


@pytest.mark.parametrize("name", SPOILED)
def test_the_same_code_in_both_precisions_is_silent(name: str) -> None:
    """With float32 casts around it, 16 bits take FP32's path."""
    function = SPOILED[name]
    model = Of(lambda h: function(h.float()))
    assert code_findings(scan(model.eval(), inputs(), policy="half")) == []


def test_a_dtype_that_another_function_asks_about_is_followed() -> None:
    model = Of(passed_on).eval()
    (found,) = code_findings(scan(model, inputs(), policy="half"))
    assert (found.code, found.severity) == ("AMP212", "error")
    assert found.source is not None
    assert found.source.line == line_of(_branch, "h.tanh()")


class Region(nn.Module):
    """Scores in an autocast region, which a number limits in float16 only."""

    def __init__(self, device: str, limit: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query, self.device, self.limit = nn.Linear(16, 16), device, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.float16):
            q = self.query(x)
            scores = q @ q.mT
            if scores.dtype == torch.float16 and self.limit:
                scores = scores.clamp(-self.limit, self.limit)
            scores = scores / 4096
            return scores.float() if self.limit else torch.softmax(scores, -1).float()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_models_own_autocast_is_no_part_of_fp32(device: str) -> None:
    model, x = Region(device, 1.0), inputs()
    with torch.no_grad():
        fp32 = model.query(x) @ model.query(x).mT / 4096
    report = scan(model, x, policy="torch-cuda")
    (found,) = code_findings(report)
    assert found.severity == "error"
    (output,) = report.outputs
    assert output.sqnr_db == pytest.approx(decibel(fp32.clamp(-1 / 4096, 1 / 4096), fp32), abs=0.1)


def test_rewrites_are_tried_on_a_model_that_overflows_in_its_own_autocast() -> None:
    model, x = Region("cpu", 0.0), inputs(300.0)
    with torch.no_grad():
        assert not model(x).isfinite().all()  # torch.autocast on the CPU
    report = scan(model, x, policy="half", advise=True)
    (found,) = (f for f in report.findings if f.severity == "error")
    assert [(t.kind, t.outcome) for t in found.tried if t.kind == "rewrite"] == [("rewrite", "cure")]


def test_autocast_flags_are_a_precision() -> None:
    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.is_autocast_enabled() else h.float()

    model, x = Of(scaled).eval(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        cpu = copy.deepcopy(model)
        truth = decibel(cpu.inner(x) * 2, model(x))  # the flag of no device is on the CPU's
    (found,) = code_findings(scan(model, x, policy="torch-cuda"))
    assert (found.code, found.severity) == ("AMP212", "error")
    assert found.source is not None
    assert found.source.line == line_of(scaled, "h * 2")
    assert f"{truth:.0f} dB against FP32" in found.cause


def test_code_that_adds_less_than_rounding_is_a_note_and_more_is_a_warning() -> None:
    def far(h: torch.Tensor) -> torch.Tensor:
        return h + (3e-3 if h.dtype == torch.float16 else 0.0)

    def near(h: torch.Tensor) -> torch.Tensor:
        return h + (1.5e-4 if h.dtype == torch.float16 else 0.0)

    for function, severity in ((far, "warning"), (near, "note")):
        model, x = Of(function).eval(), inputs()
        (found,) = code_findings(scan(model, x, policy="half"))
        assert found.severity == severity, found.cause
        assert f"{decibel(copy.deepcopy(model).half()(x.half()), model(x)):.0f} dB" in found.cause


def test_code_and_rounding_together_fall_below_the_limit() -> None:
    def shifted(h: torch.Tensor) -> torch.Tensor:
        return h + (4e-4 if h.dtype == torch.float16 else 0.0)

    model, x = Of(shifted).eval(), inputs()
    (seen,) = run(model, x).code.outputs.values()
    assert seen.sqnr_db < seen.code_sqnr_db < seen.sqnr_db + 3
    between = (seen.sqnr_db + seen.code_sqnr_db) / 2
    (found,) = code_findings(scan(model, x, policy="half", min_sqnr=between))
    assert found.severity == "error"


@pytest.mark.parametrize(
    ("low", "problem"),
    [
        (lambda h: h[:4], "output is 4x16, and 8x16 in FP32"),
        (
            lambda h: h.argmax(-1, keepdim=True).expand(8, 16),
            "output holds integers, and floating-point numbers in FP32",
        ),
        (lambda h: (h, h + 1), "output[0] is returned in 16 bits only; 2 more of the outputs differ"),
        (lambda h: {"a": h}, "output.a is returned in 16 bits only; 1 more of the outputs differ"),
    ],
    ids=["shape", "kind", "more", "names"],
)
def test_outputs_without_a_counterpart_are_one_line(low: Callable[..., Any], problem: str) -> None:
    def branching(h: torch.Tensor) -> Any:
        return low(h) if h.dtype == torch.float16 else h  # branch

    report = scan(Of(branching).eval(), inputs(), policy="half")
    (found,) = code_findings(report)
    assert found.source is not None
    assert found.source.line in (line_of(branching, "# branch"), low.__code__.co_firstlineno)
    assert (found.code, found.severity, report.verdict) == ("AMP212", "error", "fail")
    assert problem in found.cause
    assert "\n" not in found.cause


def test_code_that_is_not_finite_in_any_arithmetic_is_a_finding() -> None:
    def all_masked(h: torch.Tensor) -> torch.Tensor:
        low = -math.inf if h.dtype == torch.float16 else -1e9
        return torch.softmax(h.masked_fill(torch.arange(8)[:, None] == 3, low), -1)

    model, x = Of(all_masked).eval(), inputs()
    assert copy.deepcopy(model).half()(x.half()).isnan().any()
    assert model(x).isfinite().all()
    (found,) = code_findings(scan(model, x, policy="half"))
    assert (found.code, found.severity) == ("AMP212", "error")
    assert "output has nothing in common with FP32" in found.cause


def test_a_mask_does_not_hide_the_line_that_matters() -> None:
    def masked_and_clamped(h: torch.Tensor) -> torch.Tensor:
        h = h.masked_fill(torch.arange(16) > 9, torch.finfo(h.dtype).min)
        h = torch.softmax(h, -1)
        return h.clamp(min=torch.finfo(h.dtype).eps * 100)  # here

    (found,) = code_findings(scan(Of(masked_and_clamped).eval(), inputs(), policy="half"))
    assert found.source is not None
    assert found.source.line == line_of(masked_and_clamped, "# here")
    assert (
        "runs clamp(0.09766) in float16 and clamp(1.192e-05) in FP32 (first of 2 such places)" in found.cause
    )


def test_a_constant_that_is_rounded_while_it_is_made_counts_as_rounding() -> None:
    """The reference holds the rounded one, so the FP32 model's outputs must be compared with."""

    def little(h: torch.Tensor) -> torch.Tensor:
        return h + torch.tensor(100.03, dtype=h.dtype) - 100

    def much(h: torch.Tensor) -> torch.Tensor:
        return h + torch.tensor(1000.3, dtype=h.dtype) - 1000

    model, x = Of(little).eval(), inputs()
    assert code_findings(scan(model, x, policy="half")) == []
    (seen,) = run(model, x).code.outputs.values()
    assert seen.sqnr_db == pytest.approx(decibel(copy.deepcopy(model).half()(x.half()), model(x)), abs=0.1)
    (found,) = code_findings(scan(Of(much).eval(), x, policy="half"))
    assert found.source is not None
    assert (found.severity, found.source.line) == ("error", line_of(much, "torch.tensor"))


def _assigned(h: torch.Tensor, number: float) -> torch.Tensor:
    h[:, 3] = number
    return h


def _assigned_by_mask(h: torch.Tensor, number: float) -> torch.Tensor:
    h[h > 0] = number
    return h


@pytest.mark.parametrize("assign", [_assigned, _assigned_by_mask])
@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_an_assigned_number_beyond_the_range_is_found(assign: Callable[..., Any], policy: str) -> None:
    """In 16 bits it is infinite before the tracer sees it."""

    def masked_row(h: torch.Tensor) -> torch.Tensor:
        h[3] = -1e9
        return h.softmax(-1)

    report = scan(Of(lambda h: assign(h, 7e4)).eval(), inputs(), policy=policy)
    (found,) = code_findings(report)
    assert found.severity == "error"
    assert "(inf) in float16" in found.cause
    assert "(70,000) in FP32" in found.cause
    assert verdict_words(report)[1].startswith(
        "1 place computes something else than FP32 (1 error); even with"
    )
    (found,) = code_findings(scan(Of(masked_row).eval(), inputs(), policy=policy))
    assert found.severity == "error"
    assert scan(Of(lambda h: assign(h, 6e4)).eval(), inputs(), policy=policy).verdict == "pass"


def _operand_written(h: torch.Tensor) -> torch.Tensor:
    z = h.float()
    h.mul_(2)
    return h + z


def _result_written(h: torch.Tensor) -> torch.Tensor:
    z = h.to(torch.float32)
    z[:, :2].add_(1)
    return h + z


def _operand_unused(h: torch.Tensor) -> torch.Tensor:
    z = h.float()
    z.mul_(2)
    return z


@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
@pytest.mark.parametrize("code", [_operand_written, _result_written, _operand_unused])
def test_a_conversion_that_is_its_operand_in_fp32_is_found(code: Callable[..., Any], policy: str) -> None:
    model = Of(lambda h: code(h.clone())).eval()
    x = inputs()
    report = scan(model, x, policy=policy)
    real = copy.deepcopy(model).half()(x.half()).float()
    assert report.worst_output is not None
    assert report.worst_output.sqnr_db == pytest.approx(decibel(real, model(x)), abs=3)
    assert [f.source.code for f in code_findings(report) if f.source] == (
        [] if code is _operand_unused else [inspect.getsource(code).splitlines()[1].strip()]
    )


def test_outputs_that_show_no_accuracy_are_no_buffers() -> None:
    report = scan(Of(lambda h: h + torch.tensor(-1e9, dtype=h.dtype)).eval(), inputs(), policy="half")
    assert verdict_words(report)[1] == "1 place computes something else than FP32 (1 error)"


class Converted(nn.Module):
    """Takes another path once its own ``half`` has been called."""

    fast = False

    def half(self) -> Converted:
        self.fast = True
        return super().half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-0.1, 0.1) if self.fast else x


def test_what_a_model_does_when_it_is_converted_is_no_part_of_fp32() -> None:
    model, x = Converted().eval(), inputs()
    (found,) = code_findings(scan(model, x, policy="half"))
    truth = decibel(copy.deepcopy(model).half()(x.half()), model(x))
    assert found.source is not None
    assert found.source.line == line_of(Converted, "x.clamp")
    assert f"{truth:.0f} dB against FP32" in found.cause


def test_integers_that_differ_are_counted() -> None:
    def codes(h: torch.Tensor) -> torch.Tensor:
        return (h * (7 if h.dtype == torch.float16 else 5)).argmax(0).add(h.element_size())

    model = Of(codes).eval()
    (found,) = code_findings(scan(model, inputs(), policy="half"))
    assert found.severity == "error"
    assert "output differs from FP32 in 16 of 16 integers" in found.cause


def test_a_large_clamp_of_t5_is_found() -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="relu"
    )
    model = T5EncoderModel(config).eval()
    with torch.no_grad():
        # float32 as T5 keeps it, and a sum beyond the clamp
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(3e5)
    ids = torch.arange(12)[None]
    report = scan(model, {"input_ids": ids}, policy="half")
    (found,) = code_findings(report)
    fp32 = model(ids).last_hidden_state
    clipped = copy.deepcopy(model)
    hook = clipped.encoder.block[0].register_forward_hook(
        lambda _, __, out: (out[0].clamp(-65504, 65504), *out[1:])
    )
    truth = decibel(clipped(ids).last_hidden_state, fp32)
    hook.remove()
    assert f"{truth:.0f} dB from this difference alone" in found.cause, found.cause
    assert found.source is not None
    assert "modeling_t5.py" in found.source.file
    assert report.verdict == "fail"


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["python", "numpy"])
def test_both_draw_the_same_numbers_of_python_in_each_batch(draw: Callable[[], float]) -> None:
    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * float(draw()) if h.dtype == torch.float16 else float(draw()) * h

    before = random.getstate(), np.random.get_state()[1].tolist()
    record = run(Of(scaled).eval(), inputs(), inputs())
    assert (record.code.batches, record.code.outputs) == (2, {})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["python", "numpy"])
def test_a_number_that_only_16_bits_draw_is_found(draw: Callable[[], float]) -> None:
    def noisy(h: torch.Tensor) -> torch.Tensor:
        return h * float(draw()) if h.dtype == torch.float16 else h  # here

    (found,) = code_findings(scan(Of(noisy).eval(), inputs(), policy="half"))
    assert found.severity == "error"
    assert found.source is not None
    assert found.source.line == line_of(noisy, "# here")


class Counting(nn.Module):
    """Scales by the number of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls if x.dtype == torch.float16 else self.calls * x


def test_each_batch_is_run_on_the_model_as_it_is_by_then() -> None:
    model = Counting()
    record = run(model, inputs(), inputs(2), inputs(3))
    assert (record.code.batches, record.code.outputs) == (3, {})
    assert model.calls == 0


def test_code_that_reads_no_precision_is_not_run_again() -> None:
    def plain(h: torch.Tensor) -> torch.Tensor:
        if type(h) is torch.Tensor:
            _CALLS.append(h)
        return h.to(h.dtype) * 2

    _CALLS.clear()
    assert scan(Of(plain).eval(), inputs(), policy="half").verdict == "pass"
    assert _CALLS == []


def test_policies_share_one_run_per_batch() -> None:
    def reading(h: torch.Tensor) -> torch.Tensor:
        if type(h) is torch.Tensor:
            _CALLS.append(h)
        return h * 2 if h.dtype == torch.float32 else h + h

    _CALLS.clear()
    source = as_source(Of(reading).eval(), batches=[inputs(), inputs(2)])
    reports = scan_policies(source, ["half", "apex-o3"], ScanConfig())
    assert len(reports) == 2
    assert len(_CALLS) == 2


def test_a_model_stored_in_16_bits_is_compared_with_its_widened_copy() -> None:
    model, x = Of(with_eps).eval().half(), inputs().half()
    (found,) = code_findings(scan(model, x, policy="half"))
    truth = decibel(model(x), copy.deepcopy(model).float()(x.float()))
    assert f"{truth:.0f} dB against FP32" in found.cause
    assert model.inner.weight.dtype == torch.float16


class Stateful(nn.Module):
    """Counts its calls, updates running statistics, drops out, and asks for a dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.norm(x), 0.5, self.training)
        if x.dtype == torch.float16:
            x = x + 0
        x.mul_(2)
        return x


def test_a_run_in_fp32_draws_the_same_numbers_and_leaves_the_model_alone() -> None:
    model, x = Stateful().train(), inputs()
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    record = run(model, x)
    assert (record.code.batches, record.code.outputs) == (1, {})
    assert torch.equal(torch.rand(3), expected)
    assert model.calls == 0
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_cannot_run_in_fp32_is_audited_all_the_same() -> None:
    def refusing(h: torch.Tensor) -> torch.Tensor:
        if type(h) is torch.Tensor:
            raise MemoryError("no room for this\nand more")
        return h * 2 if h.dtype == torch.float16 else 2 * h

    (found,) = code_findings(scan(Of(refusing).eval(), inputs(), policy="half"))
    assert (found.code, found.severity) == ("AMP213", "note")
    assert "MemoryError: no room for this)" in found.cause
    assert "its trace does not differ" in found.cause


def test_an_fp32_model_that_is_not_finite_ends_the_audit_in_one_line() -> None:
    def broken(h: torch.Tensor) -> torch.Tensor:
        return h if h.dtype == torch.float16 else h / 0

    with pytest.raises(ReferenceBroken, match="the FP32 model itself gives NaN or infinity in batch 1"):
        scan(Of(broken).eval(), inputs(), policy="half")


def test_the_first_infinity_of_a_broken_fp32_model_is_not_that_of_a_mask() -> None:
    """The infinities of the mask end in its softmax, in a value and in memory."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x.masked_fill(x > 0, -torch.inf)
            scores[:, 1:3] = -torch.inf
            return scores.softmax(-1).exp().sub(1).mul(1e30).mul(1e30)

    with pytest.raises(ReferenceBroken, match=r"the first is at \(top\)/mul#2 "):
        scan(Masked(), torch.tensor([[1.0, -1.0, 2.0, -2.0]]), policy="half")


def run(model: nn.Module, *batches: torch.Tensor) -> RunRecord:
    policy = load_policy("half")
    runner = Runner(model, RunConfig(policy, policy, FLOAT16, torch.device("cpu")))
    for number, x in enumerate(batches):
        runner.run(Batch((x,), {}), number)
    return runner.record


def healthy(h: torch.Tensor) -> torch.Tensor:
    dtype, size = h.dtype, h.shape[-1]
    positions = torch.arange(size, dtype=dtype)
    scores = h.float().softmax(-1).to(dtype) + torch.zeros(size, dtype=h.dtype) + positions.to(h.dtype) / 16
    return torch.softmax(scores, -1, dtype=torch.float32).to(dtype)


def masked(h: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(16, dtype=h.dtype).masked_fill(torch.arange(16) > 9, torch.finfo(h.dtype).min)
    return torch.softmax(h + mask, -1)


@pytest.mark.parametrize("function", [healthy, masked])
@pytest.mark.parametrize("policy", ["half", "torch-cuda", "onnx"])
def test_healthy_uses_of_a_dtype_are_silent(function: Callable[..., Any], policy: str) -> None:
    assert code_findings(scan(Of(function).eval(), inputs(), policy=policy)) == []


# what Python code can learn about a precision; a trace must notice each
TOLD = {
    "dtype": lambda h: h.dtype == torch.float16,
    "dtype in": lambda h: h.dtype in (torch.float16, torch.bfloat16),
    "getattr": lambda h: getattr(h, "dty" + "pe"),
    "weight": lambda h: h.detach().dtype.itemsize,
    "finfo": lambda h: torch.finfo(h.dtype).max,
    "finfo.tiny": lambda h: torch.finfo(h.dtype).tiny,
    "itemsize": lambda h: h.itemsize,
    "nbytes": lambda h: h.nbytes,
    "element_size": lambda h: h.element_size(),
    "type": lambda h: h.type(),
    "result_type": lambda h: torch.result_type(h, 1.0),
    "promote_types": lambda h: torch.promote_types(h.dtype, torch.float16),
    "storage": lambda h: h.untyped_storage().nbytes(),
    "str": lambda h: f"{h.dtype}",
    "tensor": lambda h: torch.tensor(0.1, dtype=h.dtype),
    "new_tensor": lambda h: h.new_tensor(0.1),
    "kept": lambda h: [h.dtype],
    "returned": lambda h: (lambda: h.dtype)(),
}


@pytest.mark.parametrize("name", TOLD)
def test_whatever_tells_a_precision_is_noticed(name: str) -> None:
    assert reads_of(lambda h: (TOLD[name](h), h)[1])


def _attribute(h: torch.Tensor) -> torch.Tensor:
    h.kind = h.dtype  # type: ignore[attr-defined]
    return h


def _handed_on(h: torch.Tensor) -> torch.Tensor:
    kind = h.dtype
    other = kind
    return h if other is torch.float16 else h * 2


def _compared_with_a_second_name(h: torch.Tensor) -> torch.Tensor:
    kind, size = h.dtype, len(h)
    return (h + size).to(kind) if kind != torch.float32 else h


def _in_a_nested_function(h: torch.Tensor) -> torch.Tensor:
    kind = h.dtype
    return (lambda: h if kind == torch.float16 else -h)()


_SHARED: dict[str, Any] = {}


def _shared(h: torch.Tensor) -> torch.Tensor:
    global _kind
    _kind = h.dtype  # type: ignore[name-defined]
    return h


def _own_to(h: torch.Tensor) -> torch.Tensor:
    zeros = _SHARED.get  # a function that is no factory
    return h if zeros("x", h.dtype) is torch.float16 else -h


@pytest.mark.parametrize(
    "function",
    [_attribute, _handed_on, _compared_with_a_second_name, _in_a_nested_function, _shared, _own_to],
)
def test_a_dtype_that_goes_anywhere_else_is_noticed(function: Callable[..., Any]) -> None:
    assert reads_of(function)


def _cast(h: torch.Tensor) -> torch.Tensor:
    return h.float().to(h.dtype)


def _cast_by_name(h: torch.Tensor) -> torch.Tensor:
    size, kind = len(h), h.dtype
    h = h.float() * size
    return h.to(kind)


def _factories(h: torch.Tensor) -> torch.Tensor:
    kind = h.dtype
    return (
        h + torch.zeros(16, dtype=kind) + torch.full((16,), 0.1, dtype=h.dtype) + h.new_ones(16, dtype=kind)
    )


def _integers(h: torch.Tensor) -> torch.Tensor:
    chosen = h.argmax(-1)
    return h if chosen.dtype == torch.int64 and h.float().dtype == torch.float32 else -h


def _unused(h: torch.Tensor) -> torch.Tensor:
    kind = h.dtype  # noqa: F841
    return h


@pytest.mark.parametrize("function", [_cast, _cast_by_name, _factories, _integers, _unused])
def test_a_dtype_that_only_makes_tensors_is_no_read(function: Callable[..., Any]) -> None:
    assert reads_of(function) == ()


def test_a_flag_of_autocast_is_noticed_where_it_is_set() -> None:
    def asks(h: torch.Tensor) -> torch.Tensor:
        return h if torch.is_autocast_enabled("cuda") else -h

    def asks_for_a_dtype(h: torch.Tensor) -> torch.Tensor:
        return h if torch.get_autocast_dtype("cuda") is torch.float16 else -h

    assert reads_of(asks, "torch-cuda")
    assert reads_of(asks_for_a_dtype, "torch-cuda")
    assert reads_of(asks, "half") == ()  # a converted model runs without autocast, as FP32 does


def reads_of(function: Callable[..., Any], policy: str = "half") -> tuple[Any, ...]:
    rules = load_policy(policy)
    return trace(Of(function).eval(), (inputs(),), {}, TraceConfig(rules, rules, FLOAT16)).reads


def test_what_is_one_tensor_in_fp32_may_be_two_in_16_bits() -> None:
    """``y.float()`` is ``y`` in FP32, and a copy of it in float16."""

    def returns_both(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = m.a(x) * (1 if x.dtype == torch.float32 else 1.0)
        return {"logits": y.float(), "hidden": y}

    report = scan(Wrap(returns_both, a=linear()), torch.randn(4, 8), policy="half")
    assert (report.verdict, report.findings) == ("pass", ())
    assert [output.name for output in report.outputs] == ["output.logits", "output.hidden"]


def test_a_model_that_returns_its_loss_may_be_given_it_as_float() -> None:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (m.a(x) * (1 if x.dtype == torch.float32 else 1.0)).square().mean()
        return result

    model, x = Wrap(loss, a=linear()), torch.randn(4, 8)
    report = scan(model, x, policy="half", backward=True, loss=lambda y: y.float(), loss_scale=1.0)
    assert (report.verdict, report.findings) == ("pass", ())
