"""Measured memory, against what the allocator gave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampaudit.benchmarking.memory import live_bytes, measure_peak
from tests.support.bench import bert, rows_of

CPU = torch.device("cpu")


def test_the_peak_of_a_step_is_what_the_allocator_gave() -> None:
    def step() -> torch.Tensor:
        first = torch.ones(1000)  # 4,000 bytes
        second = torch.ones(2000)  # 12,000 together
        del first
        third = torch.ones(500)  # 10,000
        return second.sum() + third.sum()

    step()
    assert measure_peak(step, 0, CPU).total == pytest.approx(12_000, abs=64)
    assert measure_peak(step, 5_000, CPU).total == pytest.approx(17_000, abs=64)


@pytest.mark.parametrize(
    ("kind", "workspace"), [("CompositeExplicitAutograd", 40_000), ("CompositeImplicitAutograd", 0)]
)
def test_what_a_kernel_takes_for_itself_is_told_apart(kind: str, workspace: int) -> None:
    """An op of our own, as libraries choose kernels by the processor; a composite op is no kernel."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        own, out = torch.empty(10_000), torch.empty(1_000)
        own.fill_(1.0)
        return out.fill_(float(own[0]))

    with torch.library._scoped_library("ampaudit_test", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", kernel, kind)
        step = lambda: torch.ops.ampaudit_test.op(torch.ones(500))  # noqa: E731
        step()
        found = measure_peak(step, 0, CPU)
    assert found.total == pytest.approx(2_000 + 40_000 + 4_000, abs=64)
    assert found.workspace == pytest.approx(workspace, abs=64)


def test_bytes_held_count_shared_memory_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert live_bytes(model, None) == 2 * 64 * 4
    model[1].weight = model[0].weight
    assert live_bytes(model, None) == 64 * 4
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert live_bytes(model, optimizer) == 4 * 64 * 4 + 4  # weight, gradient, two moments, a step count


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
def test_memory_and_time_on_a_gpu(train: bool) -> None:
    modes = "fp32,tf32,autocast,half,bf16,converted"
    for row in rows_of(bert(train), modes, train=train, device="cuda").values():
        assert row.status in ("ok", "not supported"), row.note
        if row.status == "ok":
            assert row.memory is not None
            assert row.peak_bytes is not None
            assert row.peak_bytes >= row.memory.weights
            assert row.seconds is not None
