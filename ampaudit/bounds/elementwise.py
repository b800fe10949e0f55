"""Transfers of ops that treat each element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ampaudit.bounds.patterns import normalized_row, shifted_by_maximum
from ampaudit.bounds.span import Axes, Span, finite, symmetric
from ampaudit.bounds.transfers import ELEMENTARY, OpCall, transfer

__all__: list[str] = []

Ends = Callable[[torch.Tensor], torch.Tensor]


def _shaped(call: OpCall, low: torch.Tensor, high: torch.Tensor, norms: Axes | None = None) -> Span:
    shape = call.shape
    rank = len(shape)

    def fit(ends: torch.Tensor) -> torch.Tensor:
        return ends.reshape((1,) * (rank - ends.ndim) + tuple(ends.shape[max(ends.ndim - rank, 0) :]))

    return Span(shape, finite(fit(low), -1), finite(fit(high), 1), dict(norms or {}))


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
    result = _shaped(call, a.low + scaled_low, a.high + scaled_high, norms)
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
    products = [_product(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = products[0], products[0]
    for product in products[1:]:
        low, high = torch.minimum(low, product), torch.maximum(high, product)
    if call.given["self"] is call.given["other"]:
        low = low.clamp(min=0.0)
    norms = {axis: norm * float(b.peak) for axis, norm in _aligned(call, a).items()}
    norms |= {axis: norm * float(a.peak) for axis, norm in _aligned(call, b).items() if axis not in norms}
    return _shaped(call, low, high, norms)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Zero times an infinite end is zero: the end stands for large finite numbers."""
    return torch.where((x == 0) | (y == 0), torch.zeros((), dtype=torch.float64), x * y)


@transfer("div")
def divide(call: OpCall) -> Span:
    """Times the reciprocal, where the denominator keeps away from zero; rounding modes may add one."""
    a, b = call.span("self"), call.span("other")
    if bool(((b.low <= 0) & (b.high >= 0)).any()):
        return symmetric(call.shape, math.inf)
    ends = [_product(x, 1.0 / y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = ends[0], ends[0]
    for end in ends[1:]:
        low, high = torch.minimum(low, end), torch.maximum(high, end)
    step = 1.0 if call.has("rounding_mode") else 0.0
    smallest = float(torch.minimum(b.low.abs(), b.high.abs()).amin())
    norms = {axis: norm / smallest for axis, norm in _aligned(call, a).items()} if not step else {}
    return _shaped(call, low - step, high + step, norms)


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
    return _shaped(call, low, high).widened(ELEMENTARY)


@transfer("square")
def square(call: OpCall) -> Span:
    """x^2: from 0, where the input may be 0, to the larger square."""
    x = call.span("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.square(), x.high.square()))
    return _shaped(call, low, x.magnitude.square())


def _monotone(
    op: str,
    function: Ends,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    shrinks: bool = False,
    absolute: float = 0.0,
) -> None:
    """A function that grows everywhere: ends map to ends; ``low`` and ``high`` are its own limits.

    ``shrinks``: nowhere larger in magnitude than its input, so that norms stay. ``absolute``: error of a
    library's polynomial near 0.
    """

    @transfer(op)
    def grows(call: OpCall) -> Span:
        x = call.span("self")
        if len(call.given) > 1:  # a slope, a threshold or digits: another function
            return symmetric(call.shape, math.inf)
        lowest = function(x.low).nan_to_num(low, math.inf, -math.inf).clamp(low, high)
        highest = function(x.high).nan_to_num(high, math.inf, -math.inf).clamp(low, high)
        norms = x.norms if shrinks else {}
        wide = _shaped(call, lowest, highest, norms).widened(ELEMENTARY, absolute)
        return Span(wide.shape, wide.low.clamp(min=low), wide.high.clamp(max=_above(high)), wide.norms)


def _above(limit: float) -> float:
    """A library's tanh may round up to its limit, not beyond the next float32."""
    return limit * (1 + ELEMENTARY) if limit > 0 else limit


_monotone("exp", torch.exp, 0.0)
_monotone("exp2", torch.exp2, 0.0)
_monotone("expm1", torch.expm1, -1.0)
_monotone("sigmoid", torch.sigmoid, 0.0, 1.0)
_monotone("tanh", torch.tanh, -1.0, 1.0, shrinks=True)
_monotone("erf", torch.erf, -1.0, 1.0, absolute=ELEMENTARY)
_monotone("atan", torch.atan, -math.pi / 2, math.pi / 2)
_monotone("softplus", torch.nn.functional.softplus, 0.0)
_monotone("log_sigmoid", torch.nn.functional.logsigmoid, -math.inf, 0.0)
_monotone("log", torch.log)
_monotone("log2", torch.log2)
_monotone("log10", torch.log10)
_monotone("log1p", torch.log1p)
_monotone("sqrt", torch.sqrt, 0.0)
_monotone("sinh", torch.sinh)
_monotone("asinh", torch.asinh)
_monotone("hardsigmoid", torch.nn.functional.hardsigmoid, 0.0, 1.0)
for _name in ("floor", "ceil", "round", "trunc", "sign"):
    _monotone(_name, getattr(torch, _name))
_monotone("relu", torch.relu, 0.0, shrinks=True)
_monotone("relu6", torch.nn.functional.relu6, 0.0, 6.0, shrinks=True)


@transfer("rsqrt", "reciprocal")
def reciprocal(call: OpCall) -> Span:
    """1/x and 1/sqrt(x) of what is away from zero."""
    x = call.span("self")
    root = "rsqrt" in str(call.node.target)
    if bool((x.low <= 0).any()) and (root or bool((x.high >= 0).any())):
        return symmetric(call.shape, math.inf) if not root else _shaped(call, x.low * 0, x.low * 0 + math.inf)
    ends = (torch.rsqrt(x.low), torch.rsqrt(x.high)) if root else (1 / x.low, 1 / x.high)
    return _shaped(call, torch.minimum(*ends), torch.maximum(*ends)).widened(ELEMENTARY)


# activations x * s(x) with 0 <= s <= 1: no larger than x, and with a least value of their own
_LEAST = {"gelu": -0.1701, "silu": -0.2785, "mish": -0.3089, "hardswish": -0.3751}


@transfer(*_LEAST)
def gated(call: OpCall) -> Span:
    """GELU, SiLU, Mish, hard swish: |f(x)| <= |x|, f(x) <= max(x, 0), f >= its minimum."""
    x = call.span("self")
    name = str(call.node.target).removeprefix("aten.").split(".")[0].rstrip("_")
    low = torch.maximum(x.low.clamp(max=0.0), torch.tensor(_LEAST[name], dtype=torch.float64))
    return _shaped(call, low, x.high.clamp(min=0.0), x.norms).widened(ELEMENTARY)


@transfer("leaky_relu", "elu", "celu", "selu", "prelu")
def leaky(call: OpCall) -> Span:
    """Between 0 or the scaled lower end and the upper end, slopes being at most 1 in magnitude, or known."""
    x = call.span("self")
    name = str(call.node.target)
    scale = 1.0508 if "selu" in name else 1.0
    slope = call.given.get("negative_slope", call.given.get("alpha", 1.0))
    if call.given.get("scale", 1) != 1 or call.given.get("input_scale", 1) != 1:
        return symmetric(call.shape, math.inf)
    weight = call.tensor("weight") if "weight" in call.given else None
    if weight is not None:
        slope = float(weight.abs().amax()) * (1 + 2.0**-7)
    elif "prelu" in name:
        return symmetric(call.shape, math.inf)
    least = max(abs(float(slope)), 1.0, 1.7581 if "selu" in name else 0.0)
    turned = least if weight is not None else max(-float(slope), 0.0)
    high = torch.maximum(x.high.clamp(min=0.0), x.low.clamp(max=0.0).abs() * turned)
    return _shaped(call, x.low.clamp(max=0.0) * least, high * scale).widened(ELEMENTARY)


@transfer("neg")
def negate(call: OpCall) -> Span:
    """Ends swap."""
    x = call.span("self")
    return _shaped(call, -x.high, -x.low, x.norms)


@transfer("abs")
def absolute(call: OpCall) -> Span:
    """From the end nearer to zero, or zero, to the farther one."""
    x = call.span("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.abs(), x.high.abs()))
    return _shaped(call, low, x.magnitude, x.norms)


@transfer("sin", "cos")
def wave(call: OpCall) -> Span:
    """At most 1."""
    return symmetric(call.shape, 1.0 + ELEMENTARY)


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
    return _shaped(call, low, high)


@transfer("maximum", "minimum")
def extreme(call: OpCall) -> Span:
    """The larger, or smaller, of both ends."""
    a, b = call.span("self"), call.span("other")
    pick = torch.maximum if "maximum" in str(call.node.target) else torch.minimum
    return _shaped(call, pick(a.low, b.low), pick(a.high, b.high))


@transfer("where")
def where(call: OpCall) -> Span:
    """Either branch."""
    if not call.has("self"):
        return symmetric(call.shape, math.inf)
    a, b = call.span("self"), call.span("other")
    return _shaped(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


@transfer("masked_fill")
def masked_fill(call: OpCall) -> Span:
    """The input or the fill."""
    a, b = call.span("self"), call.span("value")
    return _shaped(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


@transfer(*"eq ne lt le gt ge logical_and logical_or logical_not isinf isnan isfinite bitwise_not".split())
def truth(call: OpCall) -> Span:
    """0 or 1."""
    return _shaped(call, torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
