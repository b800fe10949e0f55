"""Names of devices: which are accepted, and what is said where one is not there."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import ampaudit
from ampaudit.core.config import Config, DeviceName
from ampaudit.core.errors import UsageError
from ampaudit.run import device as devices
from ampaudit.run.backends import Emulated, Float32Backend, choose_backend
from ampaudit.run.program import Step
from tests.support.planted import SelfAttention


class Record(Config):
    device: DeviceName = "auto"


def machine(monkeypatch: pytest.MonkeyPatch, **counts: int) -> None:
    """Pretend that a machine has so many devices of each kind."""

    def module(kind: str) -> types.SimpleNamespace:
        count = counts.get(kind, 0)
        return types.SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)

    monkeypatch.setattr(devices.torch, "get_device_module", module)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:13", "mps", "xpu", "xpu:1"])
def test_known_names(name: str) -> None:
    assert Record(device=name).device == name


@pytest.mark.parametrize(
    "name",
    ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "cpu:1", "CUDA", "cuda\n", "mps:1"],
)
def test_other_names_are_one_line_before_torch_is_asked(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--device .*: unknown device\n  next: one of: auto, cpu, cuda"):
        Record(device=name)


def test_a_device_that_is_not_there_names_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cuda=2, mps=1)
    assert devices.available_devices() == ["cpu", "cuda:0", "cuda:1", "mps"]
    assert devices.pick_device("cuda:1") == torch.device("cuda", 1)
    assert devices.pick_device("mps") == torch.device("mps")
    for name in ("cuda:2", "xpu"):
        with pytest.raises(UsageError, match=f"{name} is not available here") as caught:
            devices.pick_device(name)
        assert caught.value.hint == "available: cpu, cuda:0, cuda:1, mps"


def test_an_audit_needs_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, mps=1)
    with pytest.raises(UsageError, match="float64") as caught:
        devices.pick_device("mps", audits=True)
    assert "--device cpu" in caught.value.hint


def test_what_runs_natively() -> None:
    names = {kind: choose_backend(torch.device(kind)).name for kind in ("cpu", "cuda", "xpu", "mps")}
    assert names == {"cpu": "emulated", "cuda": "native", "xpu": "native", "mps": "emulated"}


@pytest.mark.parametrize("strides", ["BHLD", "BLHD", "LBHD"])
def test_attention_may_have_other_strides_than_where_it_was_traced(
    monkeypatch: pytest.MonkeyPatch, strides: str
) -> None:
    """As on a GPU: the copy that makes a permuted output contiguous here may not be needed there."""
    model, x = SelfAttention().eval(), torch.randn(3, 5, 16)
    expected = ampaudit.scan(model, x, policy="half")
    order = ["BHLD".index(letter) for letter in strides]

    def elsewhere(call: Any) -> Any:
        def replaced(self: Float32Backend, step: Step, *rest: Any) -> Any:
            result = call(self, step, *rest)
            if "attention" not in str(step.node.target):
                return result
            back = [order.index(axis) for axis in range(4)]
            return result.permute(order).contiguous().permute(back)

        return replaced

    for backend in (Float32Backend, Emulated):
        monkeypatch.setattr(backend, "call", elsewhere(backend.call))
    found = ampaudit.scan(model, x, policy="half")
    assert any("attention" in site.op for site in found.sites)
    assert found.sites == expected.sites
