"""Times calls, and says how their times grow."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def repeated_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """The times of several calls."""
    return [seconds(call) for _ in range(repeats)]


def exponent(times: Mapping[int, float]) -> float:
    """Slope of log time against log size, by least squares."""
    sizes, spent = ([math.log(value) for value in values] for values in (times, times.values()))
    return statistics.linear_regression(sizes, spent).slope
