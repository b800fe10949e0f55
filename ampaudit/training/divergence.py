"""Detects on smoothed curves whether a loss diverges from FP32's."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["diverged_at", "smoothed_end"]

MAX_RELATIVE = 0.1  # of FP32's smoothed loss
MAX_OF_START = 0.02  # of FP32's first loss


def diverged_at(losses: Sequence[float | None], reference: Sequence[float | None]) -> int | None:
    """Return the first step from which the smoothed loss stays above FP32's; ``None`` if it does not.

    Above is by more than a tenth of FP32's loss and a fiftieth of its first one; or not finite.
    """
    width = max(len(losses) // 20, 1)
    ours, theirs = _smoothed(losses, width), _smoothed(reference, width)
    start = abs(next((value for value in reference if value is not None), 0.0))
    first: int | None = None
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        inside = (
            own is not None
            and other is not None
            and own - other <= MAX_RELATIVE * abs(other) + MAX_OF_START * start
        )
        first = None if inside else (step if first is None else first)
    return first


def smoothed_end(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the last tenth; ``None`` if one of them is not finite, or there is none."""
    last = losses[-max(len(losses) // 10, 1) :]
    if not last or any(value is None for value in last):
        return None
    mean = sum(value for value in last if value is not None) / len(last)
    return mean if math.isfinite(mean) else None


def _smoothed(losses: Sequence[float | None], width: int) -> list[float | None]:
    """Compute running means over ``width`` steps; ``None`` where one of them is not finite."""
    means: list[float | None] = []
    for end in range(1, len(losses) + 1):
        window = losses[max(end - width, 0) : end]
        values = [value for value in window if value is not None]
        means.append(sum(values) / len(values) if len(values) == len(window) else None)
    return means
