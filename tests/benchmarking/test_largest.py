"""The search for the largest batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampaudit.benchmarking.config import BenchConfig
from ampaudit.benchmarking.run import bench, search
from ampaudit.devices.catalogue import device_named
from tests.support.bench import bert


@given(st.integers(0, 5000))
def test_the_search_finds_the_largest(limit: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = search(fits)
    assert found <= limit
    assert found >= limit - limit // 32
    assert found == limit or limit > 64
    assert len(asked) < 30


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    card = replace(device_named("v100"), memory_gb=0.02)
    settings = BenchConfig(modes=["fp32", "half", "converted"], repeats=1, target=card, max_batch=True)
    report = bench(bert(False), config=settings)
    sizes = {one.mode: one.batch_size for one in report.largest}
    assert set(sizes) == {"fp32", "half"}  # a graph is for one size
    assert sizes["half"] > 1.8 * sizes["fp32"] > 0
    at = bench(bert(False), config=settings, sizes=(sizes["fp32"],), modes=["fp32"], max_batch=False)
    own = at.rows[0].workspace_bytes or 0
    # the size is found to 1/32
    assert (at.rows[0].peak_bytes or 0) - own == pytest.approx(20e6, rel=1 / 32 + 0.02)
