"""Modes: what they compute, and those that cannot run."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ampaudit.audit.inputs import as_source
from ampaudit.benchmarking.config import parse_modes
from ampaudit.benchmarking.run import bench
from ampaudit.core.errors import UsageError
from ampaudit.devices.catalogue import device_named
from tests.support.bench import bert, rows_of


def test_the_model_is_left_as_it_was() -> None:
    source = bert(True)
    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    rows_of(source, "fp32,half,converted", train=True)
    assert all(torch.equal(before[name], value) for name, value in source.model.state_dict().items())
    assert all(p.grad is None for p in source.model.parameters())


def test_locked_flags_of_torch_do_no_harm() -> None:
    """torch.testing's tools lock the global flags of cudnn for the whole process."""
    torch.backends.disable_global_flags()
    assert (
        rows_of(as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)]), "fp32")["fp32"].status == "ok"
    )


def test_accuracy_stands_beside_each_mode() -> None:
    found = rows_of(bert(False), "fp32,half,bf16,autocast")
    assert found["fp32"].sqnr_db is None
    assert 40 < found["half"].sqnr_db < 90  # type: ignore[operator]
    assert found["bf16"].sqnr_db < found["half"].sqnr_db  # type: ignore[operator]
    large = nn.Linear(8, 8)
    with torch.no_grad():
        large.weight.fill_(1e4)
    broken = rows_of(as_source(large.eval(), batches=[torch.ones(2, 8)]), "fp32,half")
    assert broken["fp32"].finite is True
    assert broken["half"].finite is False
    assert broken["half"].status == "ok"


class Rotary(nn.Module):
    """Has a complex buffer and a complex output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64)
        self.register_buffer("turns", torch.polar(torch.ones(32), torch.arange(32.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.inner(x).float().unflatten(-1, (32, 2))) * self.turns


def test_complex_weights_and_outputs_count() -> None:
    """``half()`` and ``bfloat16()`` keep complex weights, which ``to(dtype)`` cuts to their real parts."""
    model, x = Rotary().eval(), torch.randn(4, 64)
    found = rows_of(as_source(model, batches=[x]), "fp32,half,bf16")
    with torch.no_grad():
        exact = model(x)
        outputs = {"half": copy.deepcopy(model).half()(x.half())}
        outputs["bf16"] = copy.deepcopy(model).bfloat16()(x.bfloat16())
    for mode, output in outputs.items():
        ratio = (exact.abs().square().sum() / (output - exact).abs().square().sum()).item()
        assert found[mode].sqnr_db == pytest.approx(10 * math.log10(ratio), abs=0.1)


def test_fp32_is_float32_for_a_model_in_16_bits() -> None:
    model = nn.Linear(64, 64).bfloat16().eval()
    rows = rows_of(as_source(model, batches=[torch.randn(4, 64).bfloat16()]), "fp32,half,bf16")
    memory, accuracies = rows["fp32"].memory, (rows["bf16"].sqnr_db, rows["half"].sqnr_db)
    assert memory is not None
    assert memory.weights == 4 * (64 * 64 + 64)
    assert accuracies[0] is not None
    assert accuracies[1] is not None
    assert accuracies[0] < accuracies[1]
    assert model.weight.dtype is torch.bfloat16


class Ragged(nn.Module):
    """Returns one number more in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype is torch.float32 else torch.cat([x, x[:1]])


def test_what_cannot_be_compared_is_not_called_exact() -> None:
    x = torch.randn(8)
    ragged = rows_of(as_source(Ragged().eval(), batches=[x]), "fp32,half")
    assert (ragged["half"].sqnr_db, ragged["half"].problem) == (None, "output 0 has shape (9,), in FP32 (8,)")
    linear = as_source(nn.Linear(8, 8).eval(), batches=[x])
    report = bench(linear, modes=["tf32", "half"] if not torch.cuda.is_available() else ["half"], repeats=1)
    assert report.rows[-1].problem == "fp32 did not run"
    text = str(report)
    assert "exact" not in text
    assert "multiples of tf32" not in text


def test_a_named_device_gives_estimates_and_cudas_autocast() -> None:
    found = rows_of(bert(False), "fp32,autocast,half", target=device_named("v100"))
    assert found["half"].at_best < found["fp32"].at_best  # type: ignore[operator]
    assert "torch.autocast('cuda', float16)" in found["autocast"].how
    assert found["autocast"].work.fast_share > 0.9  # type: ignore[union-attr]
    assert found["autocast"].work.cast_bytes > 0  # type: ignore[union-attr]


def test_a_small_model_is_trained_in_every_mode() -> None:
    source = as_source(nn.Linear(8, 8), batches=[torch.ones(2, 8)])
    found = rows_of(replace(source, loss=lambda y: y.square().mean()), "fp32,bf16,autocast", train=True)
    assert {mode: row.status for mode, row in found.items()} == dict.fromkeys(found, "ok")
    assert {mode: row.finite for mode, row in found.items()} == dict.fromkeys(found, True)


class Picky(nn.Module):
    """Refuses 16 bits, as code with a check of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.weight.dtype is not torch.float32:
            raise TypeError("float32 weights, please")
        return self.inner(x)


def test_a_mode_that_fails_is_a_row() -> None:
    found = rows_of(as_source(Picky().eval(), batches=[torch.ones(2, 8)]), "fp32,tf32,half")
    assert found["fp32"].status == "ok"
    assert found["half"].status == "failed"
    assert found["half"].note == "TypeError: float32 weights, please"
    if not torch.cuda.is_available():
        assert found["tf32"].status == "not supported"


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    source = as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)])
    real = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype is torch.float16:
            raise kind(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    found = rows_of(source, "fp32,half")
    assert found["half"].status == "out of memory"
    assert found["fp32"].status == "ok"


@pytest.mark.parametrize("text", ["fp31", "", "half,fp8"])
def test_modes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--modes"):
        parse_modes(text)
