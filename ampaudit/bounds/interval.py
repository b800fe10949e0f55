"""Defines intervals: elementwise lower and upper ends of a value, and bounds on norms along an axis.

Ends are float64 tensors that broadcast to the value: a dimension has size 1 where all its elements share
one bound. So a hidden state of shape (batch, tokens, 768) may have ends of shape (1, 1, 768), and splitting
it into heads splits its ends the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Axes = Mapping[int, torch.Tensor]
_MAX_ENDS = 1 << 16  # ends of a known tensor
# float64 arithmetic on ends is itself rounded; each result is widened by this much
OUTWARD = 2.0**-40


@dataclass(frozen=True)  # without slots, so that results can be cached
class Interval:
    """The known bounds of a value of a given shape."""

    shape: tuple[int, ...]  # shape of the value
    low: torch.Tensor  # lower ends, broadcastable to the shape
    high: torch.Tensor  # upper ends, broadcastable to the shape
    # bounds on the L2 norm along an axis, by axis (from 0); of size 1 along that axis
    norms: Axes = field(default_factory=dict)
    sums: Axes = field(default_factory=dict)  # bounds on the sum of magnitudes along an axis, by axis
    # bound on the magnitude of the mean along the last axis; ``None`` if it follows from the others
    mean: float | None = None

    @property
    def magnitude(self) -> torch.Tensor:
        """The largest |x| of each element."""
        cache = self.__dict__  # functools.cached_property takes a lock in Python 3.11
        if "_magnitude" not in cache:
            cache["_magnitude"] = torch.maximum(self.low.abs(), self.high.abs())
        magnitude: torch.Tensor = cache["_magnitude"]
        return magnitude

    @property
    def peak(self) -> float:
        """The largest |x| of all elements."""
        cache = self.__dict__
        if "_peak" not in cache:
            cache["_peak"] = float(self.magnitude.amax()) if self.magnitude.numel() else 0.0
        peak: float = cache["_peak"]
        return peak

    @property
    def bounded(self) -> bool:
        """Whether all ends are finite."""
        return math.isfinite(self.peak)

    def axis(self, axis: int) -> int:
        """Return an axis counted from 0."""
        return axis % len(self.shape) if self.shape else 0

    def norm(self, axis: int) -> torch.Tensor:
        """Bound the L2 norm along an axis: by a known norm or sum, and by the root of the summed squares."""
        place = self.axis(axis)
        length = self._along(self.magnitude.square(), place).sqrt()
        known = self.norms.get(place)
        known = self.sums.get(place) if known is None else known
        return length if known is None else torch.minimum(length, known)

    def sum(self, axis: int) -> torch.Tensor:
        """Bound the sum of magnitudes along an axis."""
        place = self.axis(axis)
        total = self._along(self.magnitude, place)
        known = self.sums.get(place)
        if known is None and place in self.norms:
            known = self.norms[place] * math.sqrt(self.shape[place])  # Cauchy and Schwarz
        return total if known is None else torch.minimum(total, known)

    @property
    def row_mean(self) -> float:
        """Bound |mean| along the last axis."""
        if not self.shape:
            return self.peak
        mean = float(self.sum(-1).amax()) / max(self.shape[-1], 1)
        return mean if self.mean is None else min(mean, self.mean)

    def _along(self, ends: torch.Tensor, axis: int) -> torch.Tensor:
        if not self.shape:
            return ends
        total = ends.sum(axis, keepdim=True)
        return total if ends.shape[axis] == self.shape[axis] else total * self.shape[axis]

    def over(self, axis: int) -> Interval:
        """Return the interval with one bound for all elements along an axis."""
        place = self.axis(axis)
        low, high = self.low.amin(place, keepdim=True), self.high.amax(place, keepdim=True)
        return Interval(self.shape, low, high)

    def widened(self, relative: float, absolute: float = 0.0) -> Interval:
        """Return the interval for values with an error of up to ``relative * |x| + absolute``."""
        # v - |v| * relative is monotone in v, so that the error of an end depends on that end alone
        sizes = (self.low.abs(), self.high.abs()) if relative < 1 else (self.magnitude, self.magnitude)
        grown = 1.0 + relative + OUTWARD

        def more(axes: Axes, per: float) -> Axes:
            return {a: finite(n * grown + per * absolute * self.shape[a], 1) for a, n in axes.items()}

        low = finite(self.low - (sizes[0] * relative + absolute), -1)
        high = finite(self.high + (sizes[1] * relative + absolute), 1)
        mean = self.mean
        if mean is not None:
            mean += float(self.sum(-1).amax()) / max(self.shape[-1], 1) * relative + absolute
        return Interval(self.shape, low, high, more(self.norms, 1.0), more(self.sums, 1.0), mean)

    def clipped(self, limit: float) -> Interval:
        """Return the interval for values known to lie within a symmetric limit."""
        low, high = self.low.clamp(-limit, limit), self.high.clamp(-limit, limit)
        return Interval(self.shape, low, high, self.norms, self.sums, self.mean)

    def within(self, other: Interval) -> Interval:
        """Return the intersection of two bounds of one value."""
        low, high = torch.maximum(self.low, other.low), torch.minimum(self.high, other.high)
        mean = self.mean if other.mean is None else other.mean
        return Interval(self.shape, low, high, self.norms or other.norms, self.sums or other.sums, mean)


def finite(ends: torch.Tensor, sign: int) -> torch.Tensor:
    """Replace NaN from inf - inf by the infinite end, since nothing is known."""
    return ends.nan_to_num(sign * math.inf, math.inf, -math.inf)


def between(shape: tuple[int, ...], low: float, high: float) -> Interval:
    """Return an interval with one pair of ends for all elements."""
    ends = torch.tensor([low, high], dtype=torch.float64)
    return Interval(shape, *(end.reshape((1,) * len(shape)) for end in ends))


def symmetric(shape: tuple[int, ...], magnitude: torch.Tensor | float) -> Interval:
    """Return the interval from -magnitude to +magnitude."""
    ends = finite(torch.as_tensor(magnitude, dtype=torch.float64), 1)
    ends = ends[(None,) * (len(shape) - ends.ndim)]
    return Interval(shape, -ends, ends)


def unbounded(shape: tuple[int, ...]) -> Interval:
    """Return an interval without bounds."""
    return symmetric(shape, math.inf)


def hull(shape: tuple[int, ...], *intervals: Interval) -> Interval:
    """Return an interval that contains the elements of all values; a value without elements adds none."""
    filled = [interval for interval in intervals if 0 not in interval.shape]
    low = min((float(interval.low.amin()) for interval in filled), default=0.0)
    return between(shape, low, max((float(interval.high.amax()) for interval in filled), default=0.0))


def from_tensor(value: torch.Tensor) -> Interval:
    """Bound a known tensor, element by element.

    In a large tensor, each position of the last axis has one bound or, if that axis is large as well, the
    whole tensor.
    """
    shape = tuple(value.shape)
    wide = value.detach()
    if wide.dtype is torch.bool:
        wide = wide.to(torch.int8)
    if value.numel() == 0:
        return symmetric(shape, 0.0)
    if value.numel() <= _MAX_ENDS:
        ends = wide.double()
        return Interval(shape, finite(ends, -1), finite(ends, 1))
    leading = tuple(range(value.ndim - 1))
    low, high = wide.amin(leading, keepdim=True).double(), wide.amax(leading, keepdim=True).double()
    if low.numel() > _MAX_ENDS:
        low, high = low.amin().reshape((1,) * value.ndim), high.amax().reshape((1,) * value.ndim)
    return Interval(shape, finite(low, -1), finite(high, 1))
