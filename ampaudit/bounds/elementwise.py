"""Transfers of arithmetic on elements: sums, products, powers, limits, choices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

import torch

from ampaudit.bounds.patterns import normalized_row, shifted_by_maximum
from ampaudit.bounds.span import Span, between, symmetric
from ampaudit.bounds.transfers import ELEMENTARY, OpCall, shaped, transfer

__all__: list[str] = []


def _aligned(call: OpCall, span: Span) -> dict[int, torch.Tensor]:
    """An operand's norms by the output's axes, where broadcasting does not repeat along them."""
    shape, shift = call.shape, len(call.shape) - len(span.shape)
    return {
        axis + shift: norm.reshape((1,) * shift + tuple(norm.shape))
        for axis, norm in span.norms.items()
        if span.shape[axis] == shape[axis + shift]
    }


def _mean_of(call: OpCall, span: Span) -> float:
    """Along the output's last axis: an operand that is repeated along it is its own mean."""
    return span.row_mean if span.shape and span.shape[-1] == call.shape[-1] else span.peak


def _norm_of(call: OpCall, span: Span, axis: int) -> torch.Tensor:
    """Of an operand, along an axis of the output: repeated elements count as often as they are repeated."""
    shape, shift = call.shape, len(call.shape) - len(span.shape)
    place = axis - shift
    size = shape[axis]
    if place < 0 or not span.shape:
        return span.magnitude.reshape((1,) * shift + tuple(span.magnitude.shape)) * math.sqrt(size)
    norm = span.norm(place).reshape((1,) * shift + tuple(span.norm(place).shape))
    return norm if span.shape[place] == size else norm * math.sqrt(size)


@transfer("add", "sub", "rsub")
def add(call: OpCall) -> Span:
    """Ends add up; so do norms, by the triangle inequality."""
    a, b = call.span("self"), call.span("other")
    if "rsub" in str(call.node.target):
        a, b = b, a
    alpha = float(call.given.get("alpha", 1))
    alpha = alpha if "add" in str(call.node.target) else -alpha
    scaled_low, scaled_high = (
        (b.low * alpha, b.high * alpha) if alpha >= 0 else (b.high * alpha, b.low * alpha)
    )
    axes = set(_aligned(call, a)) | set(_aligned(call, b))
    norms = {axis: _norm_of(call, a, axis) + abs(alpha) * _norm_of(call, b, axis) for axis in axes}
    result = shaped(call, a.low + scaled_low, a.high + scaled_high, norms)
    if a.mean is not None or b.mean is not None:
        result = replace(result, mean=_mean_of(call, a) + abs(alpha) * _mean_of(call, b))
    if "sub" in str(call.node.target) and shifted_by_maximum(call):
        result = Span(result.shape, result.low, result.high.clamp(max=0.0), result.norms)
    return result


@transfer("mul")
def multiply(call: OpCall) -> Span:
    """The extremes are among the four products of ends; a norm grows by the other factor's peak."""
    if (row := normalized_row(call)) is not None:
        return row
    a, b = call.span("self"), call.span("other")
    low, high = _extremes(a, b.low, b.high)
    if call.given["self"] is call.given["other"]:
        low = low.clamp(min=0.0)
    norms = {axis: norm * float(b.peak) for axis, norm in _aligned(call, a).items()}
    norms |= {axis: norm * float(a.peak) for axis, norm in _aligned(call, b).items() if axis not in norms}
    return shaped(call, low, high, norms)


def _extremes(a: Span, *factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest product of an end of a span and a factor."""
    products = [_product(end, factor) for end in (a.low, a.high) for factor in factors]
    return reduce(torch.minimum, products), reduce(torch.maximum, products)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Zero times an infinite end is zero: the end stands for large finite numbers."""
    return torch.where((x == 0) | (y == 0), torch.zeros((), dtype=torch.float64), x * y)


@transfer("div")
def divide(call: OpCall) -> Span:
    """Times the reciprocal, where the denominator keeps away from zero; rounding modes may add one."""
    a, b = call.span("self"), call.span("other")
    if bool(((b.low <= 0) & (b.high >= 0)).any()):
        return symmetric(call.shape, math.inf)
    low, high = _extremes(a, 1.0 / b.low, 1.0 / b.high)
    step = 1.0 if call.has("rounding_mode") else 0.0
    smallest = float(torch.minimum(b.low.abs(), b.high.abs()).amin())
    norms = {axis: norm / smallest for axis, norm in _aligned(call, a).items()} if not step else {}
    return shaped(call, low - step, high + step, norms)


@transfer("pow")
def power(call: OpCall) -> Span:
    """Whole exponents of any base, and any exponent of a positive base."""
    if not isinstance(call.given.get("exponent"), int | float) or not call.has("self"):
        return symmetric(call.shape, math.inf)
    exponent, x = float(call.given["exponent"]), call.span("self")
    positive = bool((x.low > 0).all())
    if exponent < 0 and not positive:
        return symmetric(call.shape, math.inf)
    if not positive and not (exponent.is_integer() or bool((x.low >= 0).all())):
        return symmetric(call.shape, math.inf)
    ends = (x.low.pow(exponent), x.high.pow(exponent))
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    if exponent > 0 and exponent % 2 == 0:
        low = torch.where((x.low <= 0) & (x.high >= 0), torch.zeros_like(low), low)
    return shaped(call, low, high).widened(ELEMENTARY)


@transfer("square")
def square(call: OpCall) -> Span:
    """x^2: from 0, where the input may be 0, to the larger square."""
    x = call.span("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.square(), x.high.square()))
    return shaped(call, low, x.magnitude.square())


@transfer("neg")
def negate(call: OpCall) -> Span:
    """Ends swap."""
    x = call.span("self")
    return shaped(call, -x.high, -x.low, x.norms)


@transfer("abs")
def absolute(call: OpCall) -> Span:
    """From the end nearer to zero, or zero, to the farther one."""
    x = call.span("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.abs(), x.high.abs()))
    return shaped(call, low, x.magnitude, x.norms)


@transfer("clamp", "clip", "hardtanh", "clamp_min", "clamp_max")
def clamp(call: OpCall) -> Span:
    """Both ends are moved inside."""
    x = call.span("self")
    low, high = x.low, x.high
    names = ("min_val", "max_val") if "hardtanh" in str(call.node.target) else ("min", "max")
    defaults = (-1.0, 1.0) if "hardtanh" in str(call.node.target) else (None, None)
    for name, default, limit in zip(names, defaults, (torch.maximum, torch.minimum), strict=True):
        if call.has(name) or default is not None:
            by = call.span(name) if call.has(name) else None
            first, second = (
                (by.low, by.high) if by is not None else (torch.tensor(default), torch.tensor(default))
            )
            low, high = limit(low, first.double()), limit(high, second.double())
    return shaped(call, low, high)


@transfer("maximum", "minimum")
def extreme(call: OpCall) -> Span:
    """The larger, or smaller, of both ends."""
    a, b = call.span("self"), call.span("other")
    pick = torch.maximum if "maximum" in str(call.node.target) else torch.minimum
    return shaped(call, pick(a.low, b.low), pick(a.high, b.high))


@transfer("where")
def where(call: OpCall) -> Span:
    """Either branch."""
    if not call.has("self"):
        return symmetric(call.shape, math.inf)
    a, b = call.span("self"), call.span("other")
    return shaped(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


@transfer("masked_fill")
def masked_fill(call: OpCall) -> Span:
    """The input or the fill."""
    a, b = call.span("self"), call.span("value")
    return shaped(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


@transfer(*"eq ne lt le gt ge logical_and logical_or logical_not isinf isnan isfinite bitwise_not".split())
def truth(call: OpCall) -> Span:
    """0 or 1."""
    return between(call.shape, 0.0, 1.0)
