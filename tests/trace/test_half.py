"""Policy ``half`` against models that are really converted by ``.half()``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.formats import FLOAT16, format_named
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.fake_model import named_tensors, stored_dtypes
from tests.support.native import run_converted


class Buffers(nn.Module):
    """One buffer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("precise", torch.linspace(1, 2, 4, dtype=torch.float64))
        self.register_buffer("brain", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("turn", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.precise * self.wide + self.brain + self.turn.abs() + self.index
        return x.masked_fill(~self.mask, 0.0)


class KeptNorm(nn.Module):
    """Keeps its norm, and its table, as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = torch.full((4,), 2.0)
        self.low = False

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeptNorm:
        super()._apply(fn, recurse)
        self.norm.float()
        self.table = fn(self.table)
        return self

    def half(self) -> KeptNorm:
        self.low = True
        return super().half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.table
        x = self.norm(x.float()).to(x.dtype)
        return x * 2 if self.low else x


class Inner(nn.Module):
    """Refuses to be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def _apply(self, fn: Any, recurse: bool = True) -> Inner:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "buffers": Buffers,
    "overridden": KeptNorm,
    "refusing": lambda: nn.Sequential(nn.Linear(4, 4), Inner()),
    "double": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double(),
    "norms": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(),
    "recurrent": lambda: nn.GRU(4, 4),
}


def traced(model: nn.Module, x: torch.Tensor, policy: str, dtype: str = "float16") -> TracedModel:
    rules = load_policy(policy)
    return trace(model, (x,), {}, TraceConfig(rules, load_policy("torch-cuda"), format_named(dtype), seed=0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_is_stored_and_each_op_runs_as_after_half(name: str, dtype: str) -> None:
    model, x = MODELS[name](), torch.linspace(-1, 1, 12).reshape(3, 4)
    real = copy.deepcopy(model)
    real = real.half() if dtype == "float16" else real.bfloat16()
    lower: torch.dtype = getattr(torch, dtype)
    given = x.double() if name == "double" else x
    made = traced(model, given, "half", dtype)
    stored = {p.name: p.dtype for p in made.placeholders if p.slot in ("parameter", "buffer")}
    assert stored.items() <= {n: t.dtype for n, t in named_tensors(real).items()}.items()
    changed = stored_dtypes(model, load_policy("half").file.weights, lower)
    own = {n: t.dtype for n, t in named_tensors(model).items()}
    assert {n: t.dtype for n, t in named_tensors(real).items()} == own | changed
    assert all(
        m.dtype == own[p.name] for p in made.placeholders if p.name in own for m in [made.tensors[p.node]]
    )
    found = run_converted(made, [given])[0]
    expected = real(x.to(lower))
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_a_table_that_apply_casts_has_its_master() -> None:
    made = traced(KeptNorm(), torch.ones(2, 4), "half")
    (place,) = [p for p in made.placeholders if p.slot == "constant"]
    assert (place.dtype, made.tensors[place.node].dtype) == (torch.float16, torch.float32)
    model = KeptNorm()
    model.table = torch.full((4,), 70000.0)
    report = ampaudit.scan(model, torch.ones(2, 4), policy="half")
    assert report.exit_code == 1
    assert not copy.deepcopy(model).half().table.isfinite().any()


def overflowing(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = Buffers(), torch.ones(2, 4)
    if name == "double buffer":
        model.precise.fill_(1e5)
    elif name == "double parameter":
        model.wide.data.fill_(1e5)
    else:
        model = model.double()  # type: ignore[assignment]
        x = torch.full((2, 4), 1e5, dtype=torch.float64)
    return model, x


@pytest.mark.parametrize("name", ["double buffer", "double parameter", "double input"])
def test_an_overflow_of_float64_is_found(name: str) -> None:
    model, x = overflowing(name)
    real = copy.deepcopy(model).half()(x.half())
    assert not real.isfinite().all()
    assert ampaudit.scan(model, x, policy="half").exit_code == 1
    model, x = overflowing(name)
    with torch.no_grad():
        for tensor in (model.precise, model.wide, x):
            tensor.clamp_(max=10)
    assert ampaudit.scan(model, x, policy="half").exit_code == 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("half", True), ("apex-o3", True), ("apex-o2", True), ("paddle-o2", True), ("onnx", False)],
)
def test_which_policies_cast_float64(policy: str, expected: bool) -> None:
    stored = stored_dtypes(Buffers(), load_policy(policy).file.weights, torch.float16)
    assert {name in stored for name in ("precise", "wide")} == {expected}
    assert "index" not in stored
    assert ("turn" in stored) == (policy == "apex-o3")  # Module.to(dtype) casts complex numbers


def test_a_double_model_converts(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    options = ampaudit.ConvertConfig(policy="half")
    report, made = ampaudit.convert(model, x, tmp_path / "out", config=options)
    assert report.exit_code == 0
    assert made is not None
    written = load_file(tmp_path / "out" / "model.safetensors")
    masters = load_file(tmp_path / "out" / "master.safetensors")
    real = copy.deepcopy(model).half().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], real[name])
        assert torch.equal(masters[name], tensor)
        assert masters[name].dtype is torch.float64
    assert all(p.dtype is torch.float64 for p in model.parameters())


def test_a_method_that_needs_data_is_one_line() -> None:
    class Looks(nn.Linear):
        def half(self) -> Looks:
            assert self.weight.abs().max() < 65504
            return super().half()

    with pytest.raises(ampaudit.AuditError, match="on a copy without data"):
        ampaudit.scan(Looks(4, 4), torch.ones(2, 4), policy="half")
    assert ampaudit.scan(Looks(4, 4), torch.ones(2, 4), policy="apex-o2").exit_code == 0
    assert FLOAT16.max == 65504
