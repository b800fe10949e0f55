"""The variation within rows, against NumPy, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ampaudit import scan
from ampaudit.report.model import Report
from ampaudit.run.outputs import OutputComparison, compare_outputs

SERIES = torch.linspace(0, 6.28, 32).sin()


def compared(reference: torch.Tensor, value: torch.Tensor) -> OutputComparison:
    return compare_outputs({"out": (reference, value)}, 0)["out"]


def by_row(reference: torch.Tensor, value: torch.Tensor, axes: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return spread and error of each row, computed one after the other in float64."""
    ref, val = (t.double().numpy() for t in (reference, value))
    others = [axis for axis in range(ref.ndim) if axis not in axes]
    found = []
    for index in np.ndindex(*(ref.shape[axis] for axis in others)):
        where: list[Any] = [slice(None)] * ref.ndim
        for axis, number in zip(others, index, strict=True):
            where[axis] = number
        row, rounded = ref[tuple(where)], val[tuple(where)]
        found.append((float(np.square(row - row.mean()).sum()), float(np.square(rounded - row).sum())))
    return found


WAYS: dict[int, list[tuple[int, ...]]] = {
    1: [(0,)],
    2: [(0, 1), (1,)],
    3: [(0, 1, 2), (2,), (1,)],
    4: [(0, 1, 2, 3), (3,), (2, 3)],
}


@given(
    rank=st.integers(1, 4),
    level=st.sampled_from([0.0, 1.0, 300.0, 1e4]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_it_is_that_of_the_rows_one_by_one(rank: int, level: float, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 17, 5, 16)[-rank:] if rank != 3 else (3, 17, 18)
    levels = torch.randn(*shape[:-1], 1, generator=draw) * level
    reference = levels + torch.randn(shape, generator=draw)
    value = reference.to(dtype).float()
    seen = compared(reference, value)
    sums = {}
    for axes in WAYS[rank]:
        rows = by_row(reference, value, axes)
        if math.prod(shape[axis] for axis in axes) >= 16:
            sums[axes] = 10 * math.log10(sum(s for s, _ in rows) / sum(e for _, e in rows))
    assert seen.rows is not None
    assert seen.rows.axes == min(sums, key=lambda axes: sums[axes])
    assert seen.variation_db == pytest.approx(min(sums.values()), abs=1e-6)
    rows = by_row(reference, value, seen.rows.axes)
    worst = min(10 * math.log10(s / e) if e else math.inf for s, e in rows)
    assert seen.rows.worst_db == pytest.approx(worst, abs=1e-6)


def test_the_worst_row_is_named_by_its_place() -> None:
    reference = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0))
    reference[2, 1] += 5e4
    seen = compared(reference, reference.bfloat16().float())
    assert seen.rows is not None
    assert seen.rows.index == (2, 1, None)
    assert seen.rows.mean == pytest.approx(5e4, rel=1e-3)


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param(torch.full((4, 32), 50001.0), id="constant"),
        pytest.param(torch.arange(4.0)[:, None].expand(4, 32) * 257, id="constant rows"),
        pytest.param(
            50000.0 + 0.001 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), id="FP32 noise"
        ),
    ],
)
def test_rows_that_do_not_vary_lose_nothing(reference: torch.Tensor) -> None:
    seen = compared(reference, reference.bfloat16().float())
    assert seen.rows is None or seen.rows.axes == (0, 1)


def test_few_numbers_are_no_row() -> None:
    reference = torch.randn(5, 15, generator=torch.Generator().manual_seed(0)) + 1000
    seen = compared(reference, reference.bfloat16().float())
    assert seen.rows is not None
    assert seen.rows.axes == (0, 1)


def test_what_is_infinite_by_intent_is_left_out() -> None:
    reference = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    reference[:, ::4] = -math.inf
    kept = torch.ones(32, dtype=torch.bool)
    kept[::4] = False
    value = reference.bfloat16().float()
    seen, finite = compared(reference, value), compared(reference[:, kept], value[:, kept])
    assert seen.variation_db == pytest.approx(finite.variation_db, abs=1e-9)


class Added(nn.Module):
    """Adds a level to each series."""

    def __init__(self, level: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("level", level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.level


def forecast(levels: torch.Tensor, x: torch.Tensor, dtype: str = "bfloat16") -> Report:
    return scan(Added(levels), x, policy="half", dtype=dtype, min_sqnr=10)


FORECASTS = {
    "series in rows": ((8, 32), torch.linspace(4e4, 6e4, 8)[:, None]),
    "time before channels": ((2, 32, 4), torch.tensor([5e4, 4e4, -6e4, 3e4])),
    "channels of an image": ((2, 4, 8, 8), torch.linspace(2e4, 6e4, 4)[:, None, None]),
    "one of many": ((16, 32), torch.tensor([5e4] + [0.0] * 15)[:, None]),
    "batches of rows": ((2, 4, 32), torch.linspace(3e4, 6e4, 4)[:, None]),
}


@pytest.mark.parametrize("name", sorted(FORECASTS))
def test_a_forecast_that_keeps_only_its_levels_is_a_warning(name: str) -> None:
    shape, levels = FORECASTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = [f for f in forecast(levels, x).findings if f.code == "AMP211"]
    assert [f.severity for f in found] == ["warning"]
    assert "the worst is [" in found[0].cause


@pytest.mark.parametrize("name", sorted(FORECASTS))
def test_the_same_series_around_zero_are_right(name: str) -> None:
    shape, levels = FORECASTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert not [f for f in forecast(levels * 0, x).findings if f.code == "AMP211"]
