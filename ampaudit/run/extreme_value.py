"""Estimates overflows beyond the data from an extreme-value distribution of the batches' peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MIN_BATCHES", "ExtremeValues", "TailRisk", "fit", "tail_risk"]

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


@dataclass(frozen=True, slots=True)
class TailRisk:
    """The estimated risk of one site.

    Attributes:
        per_million: Expected number of batches that overflow per million samples.
        low: Lower end of a 90 % interval, by parametric bootstrap.
        high: Upper end of the interval.
        batches: Number of maxima in the fit.
        samples: Number of samples in a batch.
    """

    per_million: float
    low: float
    high: float
    batches: int
    samples: int


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


def tail_risk(maxima: Sequence[float], limit: float, samples: int, seed: int = 0) -> TailRisk | None:
    """Estimate the risk at one site; ``None`` if the batches are too few or all alike.

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
    return TailRisk(_rate(distribution, limit, samples), *ends, len(maxima), samples)


def _rate(distribution: ExtremeValues, limit: float, samples: int) -> float:
    return distribution.beyond(limit) * 1e6 / samples
