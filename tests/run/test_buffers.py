"""Buffers that the forward pass writes are values like others; the oracle is a real ``.half()`` model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

import ampaudit
from ampaudit.trace.opnames import argument_names, mutated_arguments, written_arguments


class Norm(nn.Module):
    """A norm behind values of some size."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.scale)


class Average(nn.Module):
    """A moving average of squares, written in one of several ways."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None], scale: float) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("rows", torch.zeros(2, 4))
        self.write, self.scale = write, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, (x * self.scale).square().mean(0) * 64)
        return x.tanh()


def multiply_add(m: Any, v: torch.Tensor) -> None:
    m.average.mul_(0.9).add_(v)


def copy_in(m: Any, v: torch.Tensor) -> None:
    m.average.copy_(v)


def assign(m: Any, v: torch.Tensor) -> None:
    m.average = 0.9 * m.average + v


def through_a_view(m: Any, v: torch.Tensor) -> None:
    m.rows[0] = v


def lerp(m: Any, v: torch.Tensor) -> None:
    m.average.lerp_(v, 0.9)


X = torch.linspace(-1, 1, 32).reshape(8, 4)
IMAGE = torch.linspace(-1, 1, 128).reshape(2, 4, 4, 4)
NORMS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "1d": (lambda: nn.BatchNorm1d(4), X),
    "2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "plain": (lambda: nn.BatchNorm1d(4, affine=False), X),
    "instance": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
}
WRITES = [multiply_add, copy_in, assign, through_a_view, lerp]


def errors(report: Any) -> list[Any]:
    return [f for f in report.findings if f.severity.value == "error"]


def really(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Buffers that are not finite after a real step in float16."""
    half = copy.deepcopy(model).half()
    half(x.half())
    return [name for name, buffer in half.named_buffers() if not buffer.isfinite().all()]


@pytest.mark.parametrize("scale", [20000.0, 2.0], ids=["large", "small"])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_overflow_where_they_do_in_half(name: str, scale: float) -> None:
    make, x = NORMS[name]
    model = Norm(make(), scale).train()
    wrong = really(model, x)
    report = ampaudit.scan(model, x, policy="half")
    assert bool(wrong) == (scale > 1000)
    assert report.exit_code == bool(wrong)
    if wrong:
        (found,) = errors(report)
        assert found.code == "AMP117"
        assert found.site.startswith("norm/")
        assert repr(wrong[0]) in found.cause
    assert not report.outputs or all(o.sqnr_db is None or o.sqnr_db > 40 for o in report.outputs)
    assert ampaudit.scan(model.eval(), x, policy="half").exit_code == 0  # reads them, and they are small
    assert ampaudit.scan(model.train(), x, policy="torch-cuda").exit_code == 0  # keeps them in float32
    assert ampaudit.scan(model, x, policy="half", dtype="bfloat16").exit_code == 0


@pytest.mark.parametrize("write", WRITES)
def test_averages_overflow_where_they_do_in_half(write: Callable[[Any, torch.Tensor], None]) -> None:
    for scale in (100.0, 4.0):
        model = Average(write, scale)
        wrong = really(model, X)
        report = ampaudit.scan(model, X, policy="half")
        assert bool(wrong) == (scale > 10)
        assert report.exit_code == bool(wrong)


def test_a_buffer_that_a_clamp_hides_is_an_error_all_the_same() -> None:
    class Hidden(Average):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average.mul_(300.0)
            return x.tanh() + self.average.clamp(max=1.0)

    model = Hidden(copy_in, 1.0)
    model.average.fill_(1000.0)
    assert really(model, X) == ["average"]
    report = ampaudit.scan(model, X, policy="half")
    assert report.exit_code == 1
    assert [f.code for f in errors(report)] == ["AMP117"]


def test_what_an_op_writes_besides_its_result_is_rounded() -> None:
    """A quantizer's observer: the schema names what it writes, and its result is another tensor."""
    op = torch.ops.aten.fused_moving_avg_obs_fake_quant.default
    assert written_arguments(op, (None,) * 12, {}) == (3, 4, 5, 6)

    class Observed(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("on", torch.ones(1, dtype=torch.int64))
            self.register_buffer("low", torch.zeros(1))
            self.register_buffer("high", torch.zeros(1))
            self.register_buffer("step", torch.ones(1))
            self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffers = self.on, self.on, self.low, self.high, self.step, self.zero
            return torch.fused_moving_avg_obs_fake_quant(x * self.scale, *buffers, 0.1, 0, 255, -1)

    model = Observed(3.0)
    assert ampaudit.scan(model, X, policy="torch-cuda").exit_code == 0
    assert float(model.high) == 0.0


def test_hidden_writes_are_those_that_torch_makes() -> None:
    """Each norm that takes running statistics, called: what changes is what we say it writes."""
    x, checked = torch.randn(3, 4, 2, 2), 0
    for name in ("batch_norm", "native_batch_norm", "instance_norm", "_batch_norm_impl_index"):
        op: OpOverload = getattr(torch.ops.aten, name).default
        for training in (True, False):
            mean, variance = torch.zeros(4), torch.ones(4)
            rest = [True] if name in ("batch_norm", "_batch_norm_impl_index", "instance_norm") else []
            args = (x, None, None, mean, variance, training, 0.1, 1e-5, *rest)
            op(*args)
            assert not mutated_arguments(op)
            changed = tuple(p for p, t in ((3, mean), (4, variance)) if t.unique().numel() > 1)
            assert written_arguments(op, args, {}) == changed
            assert argument_names(op)[3:5] == ("running_mean", "running_var")
            checked += bool(changed)
    assert checked == 4


@pytest.mark.parametrize("policy", ["half", "torch-cuda", "torch-cpu", "ampaudit"])
@pytest.mark.parametrize("scale", [1.0, 100.0, 10000.0])
def test_bounds_of_a_norm_hold_for_its_statistics(policy: str, scale: float) -> None:
    torch.manual_seed(0)
    report = ampaudit.scan(Norm(nn.BatchNorm2d(4), scale).train(), IMAGE, policy=policy, prove=True)
    (site,) = (site for site in report.sites if "batch_norm" in site.op)
    assert site.bound is not None
    assert site.forward is not None
    assert (site.verdict == "overflows") == (policy == "half" and scale > 500)
    assert site.bound >= site.forward.peak


def test_bounds_of_statistics_that_two_calls_write() -> None:
    class Twice(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.norm(x * self.scale) * 1e-3)

    torch.manual_seed(0)
    report = ampaudit.scan(Twice(nn.BatchNorm2d(4), 100.0).train(), IMAGE, policy="half", prove=True)
    assert [site.verdict for site in report.sites if "batch_norm" in site.op] == ["observed", "observed"]


def test_float32_statistics_leave_the_headroom_of_a_result_in_16_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).train()
    site = next(s for s in ampaudit.scan(model, IMAGE * 3000, policy="torch-cuda").sites if s.layer == "1")
    assert site.precision == "float16"
    assert site.headroom_bits is not None
    assert site.headroom_bits > 12


def count_in_place(m: Any) -> None:
    m.count += 1


def count_in_a_part(m: Any) -> None:
    m.counts[0] += 1


def count_by_a_new_value(m: Any) -> None:
    m.count = m.count + 1


@pytest.mark.parametrize("count", [count_in_place, count_in_a_part, count_by_a_new_value])
@pytest.mark.parametrize("option", ["sensitivity", "backward"])
def test_graphs_without_writes_know_which_counters_stall(count: Callable[[Any], None], option: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("count", torch.tensor(2048.0))
            self.register_buffer("counts", torch.full((2, 3), 2048.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count(self)
            y: torch.Tensor = self.a(x)
            return y

    options: dict[str, Any] = {"loss": lambda y: y.mean(), "loss_scale": 1.0} if option == "backward" else {}
    model, x = Counts().eval(), torch.randn(2, 4)
    plain = ampaudit.scan(model, x, policy="half")
    report = ampaudit.scan(model, x, policy="half", **{option: True}, **options)
    (expected,) = (f for f in plain.findings if f.code == "AMP210")
    (found,) = (f for f in report.findings if f.code == "AMP210")
    assert (found.site, found.cause, found.severity) == (expected.site, expected.cause, "error")
