"""Transfer functions of elementwise arithmetic: sums, products, powers, limits, choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import torch

from ampaudit.bounds.interval import Interval, between, unbounded
from ampaudit.bounds.patterns import is_normalized, is_shifted_by_maximum
from ampaudit.bounds.stored import UNIT_ROUNDOFF, rounding
from ampaudit.bounds.transfers import ELEMENTARY, OpCall, output_interval, transfer
from ampaudit.core.formats import FLOAT32

__all__: list[str] = []


def _aligned(call: OpCall, interval: Interval) -> dict[int, torch.Tensor]:
    """Return an operand's norms by the output's axes, if broadcasting does not repeat along them."""
    shape, shift = call.shape, len(call.shape) - len(interval.shape)
    return {
        axis + shift: norm.reshape((1,) * shift + tuple(norm.shape))
        for axis, norm in interval.norms.items()
        if interval.shape[axis] == shape[axis + shift]
    }


def _mean_of(call: OpCall, interval: Interval) -> float:
    """Bound the mean along the output's last axis; an operand repeated along it is its own mean."""
    return interval.row_mean if interval.shape and interval.shape[-1] == call.shape[-1] else interval.peak


def _norm_of(call: OpCall, interval: Interval, axis: int) -> torch.Tensor:
    """Bound an operand's norm along an axis of the output, counting repeated elements."""
    shape, shift = call.shape, len(call.shape) - len(interval.shape)
    place = axis - shift
    size = shape[axis]
    if place < 0 or not interval.shape:
        return interval.magnitude.reshape((1,) * shift + tuple(interval.magnitude.shape)) * math.sqrt(size)
    norm = interval.norm(place).reshape((1,) * shift + tuple(interval.norm(place).shape))
    return norm if interval.shape[place] == size else norm * math.sqrt(size)


def _sum(call: OpCall, a: Interval, b: Interval, factor: float) -> Interval:
    """``a + factor * b``: ends add up; so do norms, by the triangle inequality."""
    scaled = sorted_ends(b.low * factor, b.high * factor) if factor else (b.low * 0, b.low * 0)
    axes = set(_aligned(call, a)) | set(_aligned(call, b))
    size = abs(factor)
    norms = {axis: _norm_of(call, a, axis) + size * _norm_of(call, b, axis) for axis in axes}
    result = output_interval(call, a.low + scaled[0], a.high + scaled[1], norms)
    if (a.mean is not None or b.mean is not None) and call.shape:
        result = replace(result, mean=_mean_of(call, a) + size * _mean_of(call, b))
    return result


def sorted_ends(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper of two ends, elementwise."""
    return torch.minimum(first, second), torch.maximum(first, second)


@transfer("add.Tensor", "add.Scalar", integers=True)
def add(call: OpCall) -> Interval:
    """``self + alpha * other``."""
    return _weighted_sum(call, "self", "other", 1)


@transfer("sub.Tensor", "sub.Scalar", "subtract.Tensor", integers=True)
def subtract(call: OpCall) -> Interval:
    """``self - alpha * other``, which is at most 0 if other is self's maximum."""
    result = _weighted_sum(call, "self", "other", -1)
    if call.number("alpha") == 1 and is_shifted_by_maximum(call.node, call.arg("self"), call.arg("other")):
        result = replace(result, high=result.high.clamp(max=0.0))
    return result


@transfer("rsub.Tensor", "rsub.Scalar", integers=True)
def reversed_subtract(call: OpCall) -> Interval:
    """``other - alpha * self``."""
    return _weighted_sum(call, "other", "self", -1)


def _weighted_sum(call: OpCall, first: str, second: str, sign: int) -> Interval:
    """``first + sign * alpha * second``."""
    alpha = call.number("alpha")
    if alpha is None:
        return unbounded(call.shape)
    result = _sum(call, call.interval(first), call.interval(second), sign * alpha)
    return _scaled_rounding(call, result, second, alpha)


def _scaled_rounding(call: OpCall, result: Interval, operand: str, alpha: float) -> Interval:
    """Widen for ``alpha * x`` rounded separately, to float32 or 16 bits, before it is added."""
    if alpha in (1, -1, 0):
        return result
    scaled = abs(alpha) * call.interval(operand).peak
    if not call.dtype.is_floating_point:
        return result if float(alpha).is_integer() else unbounded(call.shape)
    return result.widened(0.0, scaled * 2.0**-8) if scaled < call.limit else unbounded(call.shape)


@transfer("mul.Tensor", "mul.Scalar", "multiply.Tensor", integers=True)
def multiply(call: OpCall) -> Interval:
    """Take the extremes of the four products of ends; a norm grows by the other factor's peak."""
    first, second = call.arg("self"), call.arg("other")
    for value, factor in ((first, second), (second, first)):
        if (row := is_normalized(call.node, value, factor)) is not None:
            return row
    a, b = call.interval("self"), call.interval("other")
    if any(isinstance(each, float) and not abs(each) < FLOAT32.overflow_at for each in (first, second)):
        return unbounded(call.shape)  # 0 * inf
    low, high = extremes(a, b.low, b.high)
    if first is second:
        low = low.clamp(min=0.0)
    norms = {axis: product(norm, b.magnitude.amax()) for axis, norm in _aligned(call, a).items()}
    for axis, norm in _aligned(call, b).items():
        norms.setdefault(axis, product(norm, a.magnitude.amax()))
    return output_interval(call, low, high, norms)


def extremes(a: Interval, *factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest product of an interval's ends and a factor."""
    products = [product(end, factor) for end in (a.low, a.high) for factor in factors]
    return reduce(torch.minimum, products), reduce(torch.maximum, products)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply ends; zero times an infinite end is zero, as the end stands for large finite numbers."""
    return torch.where((x == 0) | (y == 0), torch.zeros((), dtype=torch.float64), x * y)


_DIVISIONS = "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode divide.Tensor true_divide.Tensor"


@transfer(*_DIVISIONS.split(), "floor_divide", "floor_divide.Scalar", integers=True)
def divide(call: OpCall) -> Interval:
    """Multiply by the reciprocal if the denominator stays away from zero; rounding to integers adds one."""
    mode = call.arg("rounding_mode") if "rounding_mode" in call.given else None
    whole = mode is not None or call.name == "floor_divide"
    if not whole and (row := is_normalized(call.node, call.arg("self"), call.arg("other"), divided=True)):
        return row
    a, b = call.interval("self"), call.interval("other")
    if bool(((b.low <= 0) & (b.high >= 0)).any()):
        return unbounded(call.shape)
    low, high = extremes(a, 1.0 / b.low, 1.0 / b.high)
    if whole:
        return output_interval(call, low - 1.0, high + 1.0).widened(ELEMENTARY)
    smallest = torch.minimum(b.low.abs(), b.high.abs()).amin()
    norms = {axis: product(norm, 1.0 / smallest) for axis, norm in _aligned(call, a).items()}
    return output_interval(call, low, high, norms)


@transfer("pow.Tensor_Scalar")
def power(call: OpCall) -> Interval:
    """Raise any base to an integer exponent, or a positive base to any exponent."""
    return _either_power(call, "exponent", call.interval("self"), _power)


def _power(call: OpCall, exponent: float, x: Interval) -> Interval:
    positive, natural = bool((x.low > 0).all()), bool((x.low >= 0).all())
    if not positive and (exponent < 0 or not (exponent.is_integer() or natural)):
        return unbounded(call.shape)
    low, high = sorted_ends(x.low.pow(exponent), x.high.pow(exponent))
    if exponent > 0 and exponent % 2 == 0:
        low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, low)
    if exponent < 0:  # 1 / (x * x) in 16 bits: the square may overflow, and the result be 0
        low = low.clamp(max=0.0)
    # an error of log(x) counts as often as the exponent is large; some kernels round x * x and continue
    slack = ELEMENTARY * max(abs(exponent), 1.0) + 4 * rounding(call.dtype)[0]
    if not exponent.is_integer():  # its own rounding counts as often as log(x), at most 104 in float32
        slack += 2 * 104 * UNIT_ROUNDOFF * abs(exponent)
    return _kept_sign(output_interval(call, low, high), slack)


@transfer("pow.Scalar")
def power_of_number(call: OpCall) -> Interval:
    """Raise a positive number to x, which is monotone in x."""
    return _either_power(call, "self", call.interval("exponent"), _power_of_number)


def _power_of_number(call: OpCall, base: float, x: Interval) -> Interval:
    if base <= 0:
        return unbounded(call.shape)
    wide = torch.tensor(base, dtype=torch.float64)
    low, high = sorted_ends(wide.pow(x.low), wide.pow(x.high))
    # the base is rounded to float32 at worst, which x powers make x times as much
    slack = ELEMENTARY * max(x.peak, 1.0) if x.bounded else 0.0
    return _kept_sign(output_interval(call, low, high), slack)


def _either_power(
    call: OpCall, name: str, x: Interval, bounded: Callable[[OpCall, float, Interval], Interval]
) -> Interval:
    """Bound a power of a number, which float32 and 16 bits read differently."""
    found = [bounded(call, number, x) for number in call.numbers(name)] or [unbounded(call.shape)]
    return output_interval(
        call,
        reduce(torch.minimum, (each.low for each in found)),
        reduce(torch.maximum, (each.high for each in found)),
    )


def _kept_sign(result: Interval, slack: float) -> Interval:
    wide = result.widened(slack)
    return replace(wide, low=torch.where(result.low >= 0, wide.low.clamp(min=0.0), wide.low))


@transfer("square")
def square(call: OpCall) -> Interval:
    """x^2: from 0, if x may be 0, to the larger square of its ends."""
    x = call.interval("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.square(), x.high.square()))
    return output_interval(call, low, x.magnitude.square())


@transfer("neg", "negative", exact=True)
def negate(call: OpCall) -> Interval:
    """Swap the ends."""
    x = call.interval("self")
    return output_interval(call, -x.high, -x.low, x.norms)


@transfer("abs", "absolute", exact=True)
def absolute(call: OpCall) -> Interval:
    """From the end nearer to zero, or from zero, to the farther one."""
    x = call.interval("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.abs(), x.high.abs()))
    return output_interval(call, low, x.magnitude, x.norms)


_CLAMPS = "clamp clamp.Tensor clip clip.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor"


@transfer(*_CLAMPS.split(), exact=True)
def clamp(call: OpCall) -> Interval:
    """Clamp both ends; if the limits cross, the upper one wins."""
    x = call.interval("self")
    low, high = x.low, x.high
    if call.has("min"):
        least = call.interval("min")
        low, high = torch.maximum(low, least.low), torch.maximum(high, least.high)
    if call.has("max"):
        most = call.interval("max")
        low, high = torch.minimum(low, most.low), torch.minimum(high, most.high)
    return output_interval(call, low, high)


@transfer("hardtanh")
def hard_tanh(call: OpCall) -> Interval:
    """Clamp to -1 and 1 or the given limits."""
    x, least, most = call.interval("self"), call.number("min_val"), call.number("max_val")
    if least is None or most is None or least > most:
        return unbounded(call.shape)
    limits = call.interval("min_val"), call.interval("max_val")
    low, high = torch.maximum(x.low, limits[0].low), torch.maximum(x.high, limits[0].high)
    return output_interval(call, torch.minimum(low, limits[1].low), torch.minimum(high, limits[1].high))


@transfer("maximum", "max.other", exact=True)
def maximum(call: OpCall) -> Interval:
    """The larger of both ends."""
    a, b = call.interval("self"), call.interval("other")
    return output_interval(call, torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


@transfer("minimum", "min.other", exact=True)
def minimum(call: OpCall) -> Interval:
    """The smaller of both ends."""
    a, b = call.interval("self"), call.interval("other")
    return output_interval(call, torch.minimum(a.low, b.low), torch.minimum(a.high, b.high))


@transfer("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar", exact=True)
def where(call: OpCall) -> Interval:
    """The union of both branches."""
    call.ignore("condition")
    return _either(call, "self", "other")


@transfer("masked_fill.Scalar", "masked_fill.Tensor", exact=True)
def masked_fill(call: OpCall) -> Interval:
    """The union of the input and the fill value."""
    call.ignore("mask")
    return _either(call, "self", "value")


def _either(call: OpCall, first: str, second: str) -> Interval:
    a, b = call.interval(first), call.interval(second)
    return output_interval(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


_COMPARISONS = [f"{op}.{kind}" for op in "eq ne lt le gt ge".split() for kind in ("Tensor", "Scalar")]


@transfer(*_COMPARISONS, "logical_and", "logical_or", "logical_xor", "logical_not", exact=True)
@transfer("isinf", "isnan", "isfinite", exact=True)
def truth(call: OpCall) -> Interval:
    """0 or 1."""
    call.ignore("self", "other")
    return between(call.shape, 0.0, 1.0)
