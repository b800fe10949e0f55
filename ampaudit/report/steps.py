"""The results of an audit over several steps (``--steps``): error and headroom per step, and their growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MIN_POINTS = 6
_MIN_FIT = 0.85  # share of the variance that a fit must explain
_MIN_DOUBLINGS = 1.5


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, the worst of all batches.

    Attributes:
        step: Number of the step, from 1.
        accuracy_db: Accuracy of the least accurate output in dB; null if all are exact, or if FP32 gives
            zeros.
        output: Name of that output; empty if all are exact.
        headroom_bits: Least headroom of the step's 16-bit values in bits; negative if one overflows.
        headroom_at: The site with the least headroom.
        origins: Sites that break by their own fault.
        broken_inputs: Inputs of the next step that are finite in FP32 and not in 16 bits, by a fault of
            ``next_inputs``.
        flipped: Inputs of the next step, such as the chosen token, that would differ in the 16-bit run, which
            continues with those of FP32.
        poisoned: Whether the fault of an earlier step leaves inf or NaN in its outputs without repairs.
    """

    step: int
    accuracy_db: float | None
    output: str
    headroom_bits: float | None
    headroom_at: str
    origins: tuple[str, ...] = ()
    broken_inputs: tuple[str, ...] = ()
    flipped: tuple[str, ...] = ()
    poisoned: bool = False

    @property
    def broken(self) -> bool:
        """Whether something leaves the range by its own fault."""
        return bool(self.origins or self.broken_inputs)


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """Exponential growth over steps, fitted.

    Attributes:
        what: ``error`` of an output relative to its values, or ``values`` nearest the limit.
        name: Name of the output or site.
        doubles_every: Doubling time in steps.
        reaches: Step at which the error exceeds the required accuracy, or values leave the range, at this
            rate; null if that is beyond twice the number of steps.
    """

    what: Literal["error", "values"]
    name: str
    doubles_every: float
    reaches: int | None = None


@dataclass(frozen=True, slots=True)
class StepsReport:
    """All steps.

    Attributes:
        traces: Number of traces of the model; large if shapes or Python values change with each step.
        steps: Steps, in order.
        growth: Growth of errors and of values, if they grow exponentially.
        fed_back: Description of how the outputs of a step become the inputs of the next.
    """

    traces: int
    steps: tuple[StepReport, ...]
    growth: tuple[StepGrowth, ...] = ()
    fed_back: str = ""

    @property
    def first_broken(self) -> StepReport | None:
        """The first step in which something leaves the range."""
        return next((step for step in self.steps if step.broken), None)

    @property
    def flipped(self) -> tuple[int, ...]:
        """The steps after which the 16-bit run would choose differently."""
        return tuple(step.step for step in self.steps if step.flipped)

    @property
    def poisoned(self) -> tuple[int, ...]:
        """The steps that an earlier fault poisons."""
        return tuple(step.step for step in self.steps if step.poisoned)


def doubling_time(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit 2^(a + b step) to the last two thirds of positive values; before, new errors hide growth.

    Returns:
        The doubling time 1/b in steps, and the fitted log2 at the last step; ``None`` if the values do not
        double within the steps, if the fit is poor, or if a power of the step fits better.
    """
    if len(points) < _MIN_POINTS:
        return None
    points = points[min(len(points) // 3, len(points) - _MIN_POINTS) :]
    logs = [math.log2(value) for _, value in points]
    steps = [float(step) for step, _ in points]
    slope, intercept, residual = _line(steps, logs)
    _, _, other = _line([math.log2(step) for step in steps], logs)
    mean = sum(logs) / len(logs)
    spread = sum((log - mean) ** 2 for log in logs)
    grown = slope * (steps[-1] - steps[0])
    if grown < _MIN_DOUBLINGS or residual > (1 - _MIN_FIT) * spread or residual >= other:
        return None
    return 1.0 / slope, intercept + slope * steps[-1]


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Return slope, intercept and the sum of squared residuals of a straight line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / over if over else 0.0
    intercept = mean_y - slope * mean_x
    return slope, intercept, sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
