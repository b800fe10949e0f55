"""Estimates overflows beyond the data from an extreme-value distribution of the batches' peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ampaudit.core.sites import SiteId
from ampaudit.report.extrapolation import Tail

MIN_SIZES = 3  # two parameters always fit two points
_MIN_GROWTH = 0.1  # bits over all sizes; less is not growth
_MIN_R_SQUARED = 0.95
_ALIKE = 0.02  # bits; fits whose residuals differ by less count as equally good
_ROUGH = 0.1  # bits; if the best fit is off by more, growth may start at a later size
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860)  # Student's t, two-sided, from 1 degree on
_FARTHEST = 64  # times the largest size; a fit of a few sizes does not extrapolate further

Form: TypeAlias = Literal["power", "linear", "logarithmic"]
# the transforms x and y of size and peak in which each form is linear: y = a + b x
_AXES: Mapping[Form, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "power": (math.log2, math.log2),
    "linear": (float, float),
    "logarithmic": (math.log2, float),
}
MIN_BATCHES = 20  # fewer maxima say nothing about a tail
RESAMPLES = 400
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExtremeValues:
    """A generalized extreme-value distribution, F(x) = exp(-(1 - k (x - location) / scale)^(1/k)).

    ``shape`` is k: negative for a heavy tail, positive for one that ends, 0 for Gumbel's.
    """

    shape: float
    location: float
    scale: float

    def beyond(self, limit: float) -> float:
        """Return the probability of a maximum above the limit."""
        reduced = (limit - self.location) / self.scale
        if abs(self.shape) < 1e-6:
            return -math.expm1(-math.exp(-reduced)) if reduced > -700 else 1.0
        inner = 1.0 - self.shape * reduced
        if inner <= 0.0:
            return 0.0 if self.shape > 0 else 1.0
        return float(-np.expm1(-np.power(inner, 1.0 / self.shape)))

    def sample(self, count: int, generator: np.random.Generator) -> Floats:
        """Draw maxima from the distribution."""
        exponential = -np.log(generator.random(count))
        if abs(self.shape) < 1e-6:
            return self.location - self.scale * np.log(exponential)
        return self.location + self.scale * (1.0 - np.power(exponential, self.shape)) / self.shape


def fit(maxima: Sequence[float] | Floats) -> ExtremeValues | None:
    """Fit by probability-weighted moments (Hosking, Wallis, Wood, 1985); ``None`` if all maxima are equal."""
    x = np.sort(np.asarray(maxima, dtype=np.float64))
    n = len(x)
    rank = np.arange(n)
    b0, b1 = x.mean(), float((rank / (n - 1) * x).mean())
    b2 = float((rank * (rank - 1) / ((n - 1) * (n - 2)) * x).mean())
    spread = 2 * b1 - b0
    if spread <= 1e-12 * max(abs(b0), 1e-300):
        return None
    c = spread / (3 * b2 - b0) - math.log(2) / math.log(3)
    k = 7.8590 * c + 2.9554 * c * c
    k = min(max(k, -0.95), 20.0)
    if abs(k) < 1e-6:
        scale = spread / math.log(2)
        return ExtremeValues(0.0, float(b0 - 0.5772156649015329 * scale), float(scale))
    gamma = math.gamma(1 + k)
    scale = spread * k / (gamma * (1 - 2.0**-k))
    return ExtremeValues(k, float(b0 + scale * (gamma - 1) / k), float(scale))


def tail_risk(
    site: SiteId, maxima: Sequence[float], limit: float, samples: int, seed: int = 0
) -> Tail | None:
    """Estimate the risk at one site, bootstrapping its interval; ``None`` if batches are too few or alike.

    ``maxima`` are the peaks of batches of so many ``samples``; the format overflows from the magnitude
    ``limit``.
    """
    if len(maxima) < MIN_BATCHES or samples < 1:
        return None
    distribution = fit(maxima)
    if distribution is None:
        return None
    generator = np.random.default_rng(seed)
    refitted = (fit(distribution.sample(len(maxima), generator)) for _ in range(RESAMPLES))
    rates = sorted(_rate(other, limit, samples) for other in refitted if other is not None)
    ends = rates[int(0.05 * len(rates))], rates[min(int(0.95 * len(rates)), len(rates) - 1)]
    return Tail(site, _rate(distribution, limit, samples), *ends, len(maxima), samples)


def _rate(distribution: ExtremeValues, limit: float, samples: int) -> float:
    return distribution.beyond(limit) * 1e6 / samples


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
    left out. Sizes must increase. Where no fit is close to all sizes, growth may start late: the smallest are
    left out, if the others are then fitted nearly exactly.

    Returns:
        ``None`` for fewer than three sizes, peaks that do not grow, a poor fit, or a limit that is too far.
    """
    fits, r_squared = _fits(sizes, peaks)
    if not fits or fits[0].residual > _ROUGH:
        for first in range(1, len(sizes) - MIN_SIZES + 1):
            late, exactness = _fits(sizes[first:], peaks[first:])
            if late and late[0].residual <= _ALIKE:
                sizes, peaks, fits, r_squared = sizes[first:], peaks[first:], late, exactness
                break
    if r_squared < _MIN_R_SQUARED:
        return None
    best = fits[0]
    size = best.reaches(limit)
    if not 1.0 <= size <= _FARTHEST * sizes[-1]:
        return None
    alike = [fit for fit in fits if fit.residual <= 2 * best.residual + _ALIKE]
    ends = [size, *(end for fit in alike for end in _ends(fit, sizes, peaks, limit))]
    exponent = best.slope if best.form == "power" else None
    return Crossing(best.form, exponent, r_squared, best.residual, size, min(ends), max(ends))


def _fits(sizes: Sequence[int], peaks: Sequence[float]) -> tuple[list[_Fit], float]:
    """Return the fits, best first, and the R squared of the best; 0 for peaks that do not grow."""
    if len(sizes) < MIN_SIZES or min(peaks) <= 0 or not all(map(math.isfinite, peaks)):
        return [], 0.0
    bits = np.log2(peaks)
    if bits[-1] - bits[0] < _MIN_GROWTH:
        return [], 0.0
    fits = sorted(
        filter(None, (_fit(form, sizes, peaks) for form in _AXES)), key=lambda fit: round(fit.residual, 4)
    )
    return fits, 1.0 - fits[0].residual ** 2 / float(np.var(bits)) if fits else 0.0


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
