"""Times calls, and fits the exponent with which their times grow."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def repeated_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the wall times of several calls in seconds."""
    return [seconds(call) for _ in range(repeats)]


def exponent(times: Mapping[int, float]) -> float:
    """Return the slope of log time against log size, by least squares."""
    sizes, spent = ([math.log(value) for value in values] for values in (times, times.values()))
    return statistics.linear_regression(sizes, spent).slope
