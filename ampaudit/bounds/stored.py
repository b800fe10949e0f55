"""Rounds intervals like values that are stored in a dtype or converted to it."""

from __future__ import annotations

import math
from functools import cache

import torch

from ampaudit.bounds.interval import OUTWARD, Interval, between, finite, symmetric
from ampaudit.core.formats import FLOAT32, FORMATS, NumberFormat
from ampaudit.trace.values import dtype_name

UNIT_ROUNDOFF = 2.0**-24  # of float32: half of an ulp, relative
_UNDERFLOW = 2.0**-110  # absolute error of a float32 sum whose terms are flushed to zero
_EXACT_INTEGERS = 2.0**53  # largest integer up to which float64, the dtype of ends, holds all integers


@cache
def format_of(dtype: torch.dtype | None) -> NumberFormat | None:
    """Return the number format of a dtype; ``None`` for float64, integers and complex numbers."""
    return FORMATS.get(dtype_name(dtype))


def as_number(value: float, dtype: torch.dtype) -> Interval:
    """Bound a Python number in an op with a tensor; some kernels round it to the tensor's format."""
    if dtype is torch.bool:
        return between((), 0.0, 1.0)
    if dtype.is_complex:
        return any_value((), dtype)
    if not dtype.is_floating_point:
        whole = float(math.trunc(value)) if math.isfinite(value) else value
        return _as_integer(between((), whole, whole), dtype)
    if math.isnan(value):
        return symmetric((), math.inf)
    form, (relative, absolute) = format_of(dtype), rounding(dtype)
    off = abs(value) * relative + absolute if value and math.isfinite(value) else 0.0
    beyond = form is not None and abs(value) >= form.overflow_at
    low = -math.inf if beyond and value < 0 else value - off if value < 0 else max(value - off, 0.0)
    high = math.inf if beyond and value > 0 else value + off if value > 0 else min(value + off, 0.0)
    return between((), low, high)


def any_value(shape: tuple[int, ...], dtype: torch.dtype | None) -> Interval:
    """Return the interval of all values of a dtype; integers have finite ends."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return symmetric(shape, torch.inf)
    if dtype is torch.bool:
        return between(shape, 0.0, 1.0)
    limits = torch.iinfo(dtype)
    return between(shape, float(limits.min), float(limits.max))


@cache
def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative and absolute error of one rounding to a floating-point dtype."""
    form = format_of(dtype)
    return (OUTWARD, 0.0) if form is None else (form.eps / 2, form.min_subnormal / 2)


def stored(interval: Interval, dtype: torch.dtype | None) -> Interval:
    """Return the interval of an op's float32 result, rounded to its dtype.

    A result beyond the format is infinite, which is the fault of that op alone, so the interval is clipped to
    finite values. Integers wrap around, so a range that exceeds the dtype becomes its whole range.
    """
    if dtype is None or dtype.is_complex:
        return any_value(interval.shape, dtype)
    if not dtype.is_floating_point:
        return _as_integer(interval, dtype)
    form = format_of(dtype)
    if form is None:
        return interval.widened(OUTWARD) if dtype is torch.float64 else any_value(interval.shape, dtype)
    relative = 8 * UNIT_ROUNDOFF if form is FLOAT32 else form.eps / 2
    absolute = form.min_subnormal / 2 + _UNDERFLOW
    result = widened_once(interval, relative, absolute)
    return (
        result if interval.peak * (1 + 2 * relative) + 2 * absolute <= form.max else result.clipped(form.max)
    )


def converted(interval: Interval, source: torch.dtype, dtype: torch.dtype) -> Interval:
    """Return the interval of an operand that is converted from one dtype to another; infinite on overflow."""
    if source is dtype:
        return interval
    if dtype.is_complex:
        return any_value(interval.shape, dtype)
    if not dtype.is_floating_point:
        return any_value(interval.shape, dtype) if source.is_floating_point else _as_integer(interval, dtype)
    form = format_of(dtype)
    if form is None or can_represent(dtype, source):
        return interval.widened(OUTWARD) if form is None else interval
    wide = widened_once(interval, *rounding(dtype))
    low = torch.where(wide.low <= -form.overflow_at, -torch.inf, wide.low)
    high = torch.where(wide.high >= form.overflow_at, torch.inf, wide.high)
    return Interval(interval.shape, low, high, wide.norms, wide.sums, wide.mean)


@cache
def can_represent(dtype: torch.dtype, source: torch.dtype | None) -> bool:
    """Return whether every value of one dtype can be represented in another."""
    form, other = format_of(dtype), format_of(source)
    if source in (dtype, torch.bool):
        return True
    if form is None or other is None:
        return False
    return other.eps >= form.eps and other.max <= form.max and other.min_subnormal >= form.min_subnormal


def widened_once(interval: Interval, relative: float, absolute: float) -> Interval:
    """Widen for one rounding, which never moves a value across zero."""
    wide = interval.widened(relative, absolute)
    low = torch.where(interval.low >= 0, wide.low.clamp(min=0.0), wide.low)
    high = torch.where(interval.high <= 0, wide.high.clamp(max=0.0), wide.high)
    return Interval(wide.shape, low, high, wide.norms, wide.sums, wide.mean)


def _as_integer(interval: Interval, dtype: torch.dtype) -> Interval:
    if dtype is torch.bool:
        return between(interval.shape, 0.0, 1.0)
    limits = torch.iinfo(dtype)
    low, high = finite(interval.low, -1), finite(interval.high, 1)
    if not bool(((low >= limits.min) & (high <= limits.max)).all()) or interval.peak > _EXACT_INTEGERS:
        return any_value(interval.shape, dtype)
    return Interval(interval.shape, low, high, interval.norms, interval.sums, interval.mean)
