"""Fits how peaks grow with the size of the inputs, and where they would leave the format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

__all__ = ["MIN_SIZES", "Crossing", "crossing_of"]

MIN_SIZES = 3  # two parameters always fit two points
_MIN_GROWTH = 0.1  # bits over all sizes; less is not growth
_MIN_R_SQUARED = 0.95
_ALIKE = 0.02  # bits; fits whose residuals differ by less count as equally good
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)  # Student's t, two-sided, from 1 degree on
_FARTHEST = 64  # times the largest size; a fit of a few sizes does not extrapolate further

Form: TypeAlias = Literal["power", "linear", "logarithmic"]
# the transforms x and y of size and peak in which each form is linear: y = a + b x
_AXES: Mapping[Form, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "power": (math.log2, math.log2),
    "linear": (float, float),
    "logarithmic": (math.log2, float),
}


@dataclass(frozen=True, slots=True)
class _Fit:
    form: Form
    offset: float
    slope: float
    residual: float  # root mean square, in bits of the peak

    def peak(self, size: float) -> float:
        x, _ = _AXES[self.form]
        y = self.offset + self.slope * x(size)
        return 2.0**y if self.form == "power" else y

    def reaches(self, limit: float) -> float:
        """Return the size at which the fit reaches the limit; infinity if it never does."""
        if self.slope <= 0:
            return math.inf
        _, y = _AXES[self.form]
        x = (y(limit) - self.offset) / self.slope
        if self.form == "linear":
            return x
        return 2.0**x if x < 1000 else math.inf


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a fit passes a limit, and how good it is; see ``report.extrapolation.SizeGrowth``."""

    form: Form
    exponent: float | None
    r_squared: float
    residual_bits: float
    size: float
    low: float
    high: float


def crossing_of(sizes: Sequence[int], peaks: Sequence[float], limit: float) -> Crossing | None:
    """Fit a power, a line and a logarithm to peaks, and return where the best fit passes the limit.

    The interval spans the 90 % prediction intervals of all equally good fits, and of these fits with one size
    left out. Sizes must increase.

    Returns:
        ``None`` for fewer than three sizes, peaks that do not grow, a poor fit, or a limit that is too far.
    """
    if len(sizes) < MIN_SIZES or min(peaks) <= 0 or not all(map(math.isfinite, peaks)):
        return None
    bits = np.log2(peaks)
    if bits[-1] - bits[0] < _MIN_GROWTH:
        return None
    fits = sorted(
        filter(None, (_fit(form, sizes, peaks) for form in _AXES)), key=lambda fit: round(fit.residual, 4)
    )
    if not fits:
        return None
    best = fits[0]
    r_squared = 1.0 - best.residual**2 / float(np.var(bits))
    size = best.reaches(limit)
    if r_squared < _MIN_R_SQUARED or not 1.0 <= size <= _FARTHEST * sizes[-1]:
        return None
    alike = [fit for fit in fits if fit.residual <= 2 * best.residual + _ALIKE]
    ends = [size, *(end for fit in alike for end in _ends(fit, sizes, peaks, limit))]
    exponent = best.slope if best.form == "power" else None
    return Crossing(best.form, exponent, r_squared, best.residual, size, min(ends), max(ends))


def _ends(fit: _Fit, sizes: Sequence[int], peaks: Sequence[float], limit: float) -> Iterator[float]:
    """Yield the sizes at which variations of a fit pass the limit."""
    count, xs, at = len(sizes), np.log2(sizes), math.log2(max(fit.reaches(limit), 1.0))
    deviation = fit.residual * math.sqrt(count / (count - 2))
    leverage = 1.0 + 1.0 / count + (at - float(xs.mean())) ** 2 / (count * float(xs.var()))
    margin = 2.0 ** (_T_90[min(count - 3, len(_T_90) - 1)] * deviation * math.sqrt(leverage))
    yield from (fit.reaches(limit / margin), fit.reaches(limit * margin))
    for out in range(len(sizes)):
        others = [i for i in range(len(sizes)) if i != out]
        other = _fit(fit.form, [sizes[i] for i in others], [peaks[i] for i in others])
        yield fit.reaches(limit) if other is None else other.reaches(limit)


def _fit(form: Form, sizes: Sequence[int], peaks: Sequence[float]) -> _Fit | None:
    """Fit by least squares; ``None`` if the fit is not positive at some size."""
    x, y = _AXES[form]
    xs, ys = np.array([x(size) for size in sizes]), np.array([y(peak) for peak in peaks])
    weights = None if form == "power" else 1.0 / ys  # of relative errors
    slope, offset = np.polyfit(xs, ys, 1, w=weights)
    trial = _Fit(form, float(offset), float(slope), 0.0)
    fitted = [trial.peak(size) for size in sizes]
    if min(fitted) <= 0:
        return None
    residual = float(np.sqrt(np.mean((np.log2(fitted) - np.log2(peaks)) ** 2)))
    return _Fit(form, float(offset), float(slope), residual)
