"""Ops from outside PyTorch run as one op, with their own kernel in each of both runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit import scan
from ampaudit.report.model import Report
from ampaudit.trace.kernels import KernelTrials
from ampaudit.trace.op_calls import OpCalled
from tests.support.wrap import Wrap

LIB = "ampaudit_foreign"
X = torch.linspace(-2, 2, 32).reshape(4, 8)


@torch.library.custom_op(f"{LIB}::softmax", mutates_args=())
def softmax(x: torch.Tensor, scale: float) -> torch.Tensor:
    powers = torch.exp(x * scale)
    return powers / powers.sum(-1, keepdim=True)


@torch.library.custom_op(f"{LIB}::relu", mutates_args=(), device_types="cpu")
def relu(x: torch.Tensor) -> torch.Tensor:
    return x * 1e5


@torch.library.custom_op(f"{LIB}::wide_only", mutates_args=())
def wide_only(x: torch.Tensor, error: int) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise (RuntimeError, AssertionError, TypeError, ValueError)[error](f"wants float32, not {x.dtype}")
    return x / 3


@torch.library.custom_op(f"{LIB}::fake_wide_only", mutates_args=())
def fake_wide_only(x: torch.Tensor) -> torch.Tensor:
    return x / 3


@torch.library.custom_op(f"{LIB}::grow", mutates_args=("x",))
def grow(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op(f"{LIB}::grow_and_sum", mutates_args=("x",))
def grow_and_sum(x: torch.Tensor, factor: float) -> torch.Tensor:
    x.mul_(factor)
    return x.sum(-1) / 64


@torch.library.custom_op(f"{LIB}::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float16 and bool((x > 1).any()):
        raise KeyError("a value above 1")
    return x.clone()


for op in (softmax, relu, wide_only, picky):
    op.register_fake(lambda x, *_: torch.empty_like(x))
grow_and_sum.register_fake(lambda x, factor: x.new_empty(x.shape[:-1]))


@fake_wide_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError("wants float32")
    return torch.empty_like(x)


def scanned(call: Callable[[torch.Tensor], Any], **options: Any) -> Report:
    report = scan(Wrap(lambda model, x: call(model.a(x)), a=identity()).eval(), X, policy="half", **options)
    assert isinstance(report, Report)
    return report


def identity() -> nn.Linear:
    made = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(8))
    return made


def codes(report: Report) -> list[str]:
    return [f.code for f in report.findings if f.severity != "note"]


def test_an_overflow_inside_is_seen_where_it_leaves_the_kernel() -> None:
    assert bool(softmax(X.half(), 30.0).isnan().any())
    assert bool(softmax(X, 30.0).isfinite().all())
    report = scanned(lambda x: softmax(x, 30.0))
    assert codes(report) == ["AMP103"]
    assert report.findings[0].op == f"{LIB}.softmax.default"
    assert codes(scanned(lambda x: softmax(x, 3.0))) == []


def test_its_values_are_those_of_its_own_kernel() -> None:
    kept: dict[int, Any] = {}
    scanned(lambda x: softmax(x, 3.0), session=ampaudit.Session(keep_outputs=kept.__setitem__))
    reference, value = kept[0]["output"]
    assert torch.equal(reference, softmax(X, 3.0))
    assert torch.equal(value, softmax(X.half(), 3.0).float())


def test_a_name_of_aten_says_nothing() -> None:
    """ATen's ReLU only selects; this one makes values, which are measured."""
    report = scanned(relu)
    (site,) = [site for site in report.sites if site.op == f"{LIB}.relu.default"]
    assert site.role == "compute"
    assert codes(report) == ["AMP101"]


def test_one_that_nothing_describes_runs_along_the_path() -> None:
    @torch.library.custom_op(f"{LIB}::undescribed", mutates_args=())
    def undescribed(x: torch.Tensor) -> torch.Tensor:
        return x * 1e5

    report = scanned(undescribed)
    assert codes(report) == ["AMP101"]
    assert report.findings[0].site == f"(top)/{LIB}::undescribed"
    assert [gap.kind for gap in report.gaps] == ["opaque op"]


@pytest.mark.parametrize("error", range(4))
def test_one_that_refuses_16_bits_continues_in_float32(error: int) -> None:
    report = scanned(lambda x: wide_only(x, error))
    assert codes(report) == ["AMP306"]
    assert "wide_only refuses float16" in report.findings[0].cause
    (site,) = [site for site in report.sites if "wide_only" in site.op]
    assert (site.precision, site.reason) == ("float32", "no-kernel")
    assert report.outputs[0].sqnr_db is not None
    assert report.outputs[0].sqnr_db > 60


def test_a_kernel_of_one_device_says_nothing_about_others() -> None:
    @torch.library.custom_op(f"{LIB}::here", mutates_args=(), device_types="cpu")
    def here(x: torch.Tensor) -> torch.Tensor:
        return wide_only(x, 0)

    here.register_fake(torch.empty_like)
    report = scanned(here)
    assert [(f.code, f.severity) for f in report.findings if f.severity != "note"] == [("AMP306", "warning")]
    assert report.exit_code == 0


def test_one_whose_description_refuses_16_bits_continues_in_float32() -> None:
    assert codes(scanned(fake_wide_only)) == ["AMP306"]


def test_what_it_writes_is_measured() -> None:
    def written(x: torch.Tensor, factor: float) -> torch.Tensor:
        grow(x, factor)
        return x / factor

    report = scanned(lambda x: written(x, 1e5))
    assert codes(report) == ["AMP101"]  # what is computed from it is not another fault
    first = report.findings[0]
    assert (first.code, first.op, first.evidence.inf) == (
        "AMP101",
        f"{LIB}.grow.default",
        int((X.abs() * 1e5 >= 65520).sum()),
    )
    assert first.evidence.peak == pytest.approx(2e5)
    assert codes(scanned(lambda x: written(x, 10.0))) == []
    kept: dict[int, Any] = {}
    scanned(lambda x: written(x, 10.0), session=ampaudit.Session(keep_outputs=kept.__setitem__))
    assert torch.equal(kept[0]["output"][1], (X.half() * 10 / 10).float())


def test_it_may_write_and_return_another_value() -> None:
    kept: dict[int, Any] = {}
    report = scanned(
        lambda x: (grow_and_sum(x, 8.0), x), session=ampaudit.Session(keep_outputs=kept.__setitem__)
    )
    assert codes(report) == []
    half = X.half()
    assert torch.equal(kept[0]["output[0]"][1], grow_and_sum(half, 8.0).float())
    assert torch.equal(kept[0]["output[1]"][1], half.float())


def test_an_error_of_its_kernel_is_one_line() -> None:
    with pytest.raises(
        ampaudit.RunFailed, match=r"test_foreign_ops\.py:\d+: .*picky.*KeyError.*a value above 1"
    ):
        scanned(picky)


def test_the_trial_of_a_kernel_leaves_no_trace() -> None:
    calls: list[torch.dtype] = []

    @torch.library.custom_op(f"{LIB}::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        torch.rand(3)
        return x + 0

    counted.register_fake(torch.empty_like)
    state = torch.get_rng_state()
    assert not KernelTrials().refuses(OpCalled(counted._opoverload, (X.half(),), {}))
    assert torch.equal(state, torch.get_rng_state())
    calls.clear()
    scanned(lambda x: counted(counted(x)))
    # one trial for both calls, two steps in each run, and their local errors
    assert calls.count(torch.float32) == 2
    assert calls.count(torch.float16) == 1 + 2 + 2
