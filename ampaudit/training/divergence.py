"""Whether a loss curve leaves that of FP32: judged on smoothed curves, because single steps differ anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["diverged_at", "smoothed_end"]

RELATIVE = 0.1  # of FP32's smoothed loss
OF_START = 0.02  # of FP32's first loss


def diverged_at(losses: Sequence[float | None], reference: Sequence[float | None]) -> int | None:
    """The first step from which on the smoothed loss stays outside of FP32's; ``None`` if it ends inside.

    Outside is further than a tenth of FP32's loss and a fiftieth of its first one, upwards; or not finite.
    """
    width = max(len(losses) // 20, 1)
    ours, theirs = _smoothed(losses, width), _smoothed(reference, width)
    start = abs(next((value for value in reference if value is not None), 0.0))
    first: int | None = None
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        inside = (
            own is not None and other is not None and own - other <= RELATIVE * abs(other) + OF_START * start
        )
        first = None if inside else (step if first is None else first)
    return first


def smoothed_end(losses: Sequence[float | None]) -> float | None:
    """Mean of the last tenth; ``None`` if one of them is not finite."""
    last = losses[-max(len(losses) // 10, 1) :]
    if any(value is None for value in last):
        return None
    mean = sum(value for value in last if value is not None) / len(last)
    return mean if math.isfinite(mean) else None


def _smoothed(losses: Sequence[float | None], width: int) -> list[float | None]:
    """Running means over the last ``width`` steps; a step that is not finite spoils those that hold it."""
    found: list[float | None] = []
    for end in range(1, len(losses) + 1):
        window = losses[max(end - width, 0) : end]
        values = [value for value in window if value is not None]
        found.append(sum(values) / len(values) if len(values) == len(window) else None)
    return found
