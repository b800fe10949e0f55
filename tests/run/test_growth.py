"""Tests that fits find the size at which a peak of known growth leaves the format, and else nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from ampaudit.run.extreme_value import crossing_of

SIZES = (64, 256, 1024, 4096)
LIMIT = 65520.0

# how a peak grows, the form that fits it, and the size at which it is the limit
EXACT: dict[str, tuple[Callable[[float], float], str, float]] = {
    "n": (lambda n: 3.0 * n, "power", 21840.0),
    "sqrt": (lambda n: 500.0 * math.sqrt(n), "power", (LIMIT / 500) ** 2),
    "square": (lambda n: 2e-3 * n * n, "power", math.sqrt(LIMIT / 2e-3)),
    "offset": (lambda n: 9000.0 + 2.0 * n, "linear", (LIMIT - 9000) / 2),
    "log": (lambda n: 4000.0 * math.log2(n), "logarithmic", 2 ** (LIMIT / 4000)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_growth_is_found_exactly(name: str) -> None:
    peak, form, crossing = EXACT[name]
    found = crossing_of(SIZES, [peak(n) for n in SIZES], LIMIT)
    assert found is not None
    assert found.form == form
    assert found.size == pytest.approx(crossing, rel=1e-6)
    assert found.low <= crossing * (1 + 1e-6)
    assert found.high >= crossing * (1 - 1e-6)
    assert found.r_squared == pytest.approx(1.0)
    if form == "power":
        assert found.exponent == pytest.approx({"n": 1, "sqrt": 0.5, "square": 2}[name])


@pytest.mark.parametrize("sizes", [(64, 512, 2048), (64, 128, 256, 512, 1024, 2048)])
def test_the_interval_holds_the_truth_under_noise(sizes: tuple[int, ...]) -> None:
    generator, held = np.random.default_rng(0), []
    for _ in range(200):
        noise = np.exp2(generator.normal(0.0, 0.05, len(sizes)))
        found = crossing_of(sizes, [float(5 * n * e) for n, e in zip(sizes, noise, strict=True)], LIMIT)
        assert found is not None
        assert found.low <= found.size <= found.high
        held.append(found.low <= LIMIT / 5 <= found.high)
    assert np.mean(held) >= 0.9


@pytest.mark.parametrize(
    "peaks",
    [
        [100.0, 100.0, 100.0, 100.0],  # constant
        [100.0, 100.1, 100.0, 100.2],  # as good as constant
        [800.0, 400.0, 200.0, 100.0],  # falls
        [100.0, 3000.0, 200.0, 9000.0],  # no fit
        [0.0, 1.0, 2.0, 3.0],  # no logarithm
        [1.0, 2.0, 4.0, math.inf],
        [1.0, 1.2, 1.44, 1.728],  # out of sight
    ],
)
def test_nothing_is_said_without_growth_or_fit(peaks: list[float]) -> None:
    assert crossing_of(SIZES, peaks, LIMIT) is None


@pytest.mark.parametrize("early", [[2.0], [3000.0], [0.0], [2.0, 2.0], [5000.0, 900.0]])
def test_growth_may_start_late(early: list[float]) -> None:
    """Another branch of the code runs on long inputs, or relu is 0 on short ones."""
    sizes = [32, 64, 128, 512, 2048][2 - len(early) :]
    found = crossing_of(sizes, [*early, 384.0, 1536.0, 6144.0], LIMIT)
    assert found is not None
    assert (found.form, found.size) == ("power", pytest.approx(21840))
    assert crossing_of(sizes, [*early, 5000.0, 7000.0, 8000.0], LIMIT) is None  # at random


def test_two_sizes_are_too_few() -> None:
    assert crossing_of((64, 256), [100.0, 400.0], LIMIT) is None
    assert crossing_of((64, 256, 1024), [100.0, 400.0, 1600.0], LIMIT) is not None
