"""Transfer functions of elementwise arithmetic: sums, products, powers, limits, choices.

Two patterns have sharper bounds than their ops (``is_shifted_by_maximum``, ``is_normalized``). They match
only if the graph proves it: the same value (behind lossless casts), the same axes, kept with size 1 so that
broadcasting aligns each row with its own statistic, a factor of one, and eps inside the root.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.nn import functional as F

from ampaudit.bounds.interval import Interval, between, symmetric, unbounded
from ampaudit.bounds.stored import UNIT_ROUNDOFF, can_represent, rounding, widened_once
from ampaudit.bounds.transfers import (
    ELEMENTARY,
    OpCall,
    arguments_of,
    output_interval,
    summation_error,
    transfer,
)
from ampaudit.core.formats import FLOAT32
from ampaudit.trace.graph import is_idle_dropout
from ampaudit.trace.values import sizes_of

Ends = Callable[[torch.Tensor], torch.Tensor]
SLACK = 2.0**-6
# the absolute rounding error of float16, 2^-25, times 1/sqrt(eps) must stay below the slack
MIN_STABLE_EPS = 1e-10

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default)
_CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)


def _aligned(call: OpCall, interval: Interval) -> dict[int, torch.Tensor]:
    """Return an operand's norms by the output's axes, if broadcasting does not repeat along them."""
    shape, shift = call.shape, len(call.shape) - len(interval.shape)
    return {
        axis + shift: norm[(None,) * shift]
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
        return interval.magnitude[(None,) * shift] * math.sqrt(size)
    norm = interval.norm(place)[(None,) * shift]
    return norm if interval.shape[place] == size else norm * math.sqrt(size)


def sorted_ends(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper of two ends, elementwise."""
    return torch.minimum(first, second), torch.maximum(first, second)


@transfer("add.Tensor", "add.Scalar", integers=True)
def add(call: OpCall) -> Interval:
    """Bound ``self + alpha * other``."""
    return _weighted_sum(call, "self", "other", 1)


@transfer("sub.Tensor", "sub.Scalar", "subtract.Tensor", integers=True)
def subtract(call: OpCall) -> Interval:
    """Bound ``self - alpha * other``, which is at most 0 if other is self's maximum."""
    result = _weighted_sum(call, "self", "other", -1)
    if call.number("alpha") == 1 and is_shifted_by_maximum(call.node, call.arg("self"), call.arg("other")):
        result = replace(result, low=result.low.clamp(max=0.0), high=result.high.clamp(max=0.0))
    return result


@transfer("rsub.Tensor", "rsub.Scalar", integers=True)
def reversed_subtract(call: OpCall) -> Interval:
    """Bound ``other - alpha * self``."""
    return _weighted_sum(call, "other", "self", -1)


def _weighted_sum(call: OpCall, first: str, second: str, sign: int) -> Interval:
    """Bound ``first + sign * alpha * second``: ends add up; so do norms, by the triangle inequality."""
    alpha = call.number("alpha")
    if alpha is None:
        return unbounded(call.shape)
    a, b = call.interval(first), call.interval(second)
    factor, size = sign * alpha, abs(alpha)
    scaled = sorted_ends(b.low * factor, b.high * factor) if factor else (b.low * 0, b.low * 0)
    axes = set(_aligned(call, a)) | set(_aligned(call, b))
    norms = {axis: _norm_of(call, a, axis) + size * _norm_of(call, b, axis) for axis in axes}
    result = output_interval(call, a.low + scaled[0], a.high + scaled[1], norms)
    if (a.mean is not None or b.mean is not None) and call.shape:
        result = replace(result, mean=_mean_of(call, a) + size * _mean_of(call, b))
    if alpha in (1, -1, 0):
        return result
    if not call.dtype.is_floating_point:
        return result if alpha.is_integer() else unbounded(call.shape)
    reach = size * b.peak  # rounded, to float32 or 16 bits, before it is added
    return result.widened(0.0, reach * 2.0**-8) if reach < call.limit else unbounded(call.shape)


@transfer("mul.Tensor", "mul.Scalar", "multiply.Tensor", integers=True)
def multiply(call: OpCall) -> Interval:
    """Bound a product by the four products of ends; a norm grows by the peak of the other factor."""
    first, second = call.arg("self"), call.arg("other")
    for value, factor in ((first, second), (second, first)):
        if (row := is_normalized(call.node, value, factor)) is not None:
            return row
    a, b = call.interval("self"), call.interval("other")
    if not (a.bounded and b.bounded):
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
    """Multiply ends; zero times an infinite end is zero, since the end stands for large finite numbers."""
    return torch.where((x == 0) | (y == 0), torch.zeros((), dtype=torch.float64), x * y)


_DIVISIONS = "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode divide.Tensor true_divide.Tensor"


@transfer(*_DIVISIONS.split(), "floor_divide", "floor_divide.Scalar", integers=True)
def divide(call: OpCall) -> Interval:
    """Bound a product with the reciprocal of a denominator without zero; rounding to integers adds one."""
    mode = call.arg("rounding_mode") if "rounding_mode" in call.arguments else None
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
    """Bound a power: of any base for an integer exponent, of a positive base for any exponent."""
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
    # the exponent multiplies an error of log(x); some kernels round x * x before they continue
    slack = ELEMENTARY * max(abs(exponent), 1.0) + 4 * rounding(call.dtype)[0]
    if not exponent.is_integer():  # log(x), at most 104 in float32, multiplies its rounding error
        slack += 2 * 104 * UNIT_ROUNDOFF * abs(exponent)
    return widened_once(output_interval(call, low, high), slack, 0.0)


@transfer("pow.Scalar")
def power_of_number(call: OpCall) -> Interval:
    """Bound a power of a positive number, which is monotone in the exponent."""
    return _either_power(call, "self", call.interval("exponent"), _power_of_number)


def _power_of_number(call: OpCall, base: float, x: Interval) -> Interval:
    if base <= 0:
        return unbounded(call.shape)
    wide = torch.tensor(base, dtype=torch.float64)
    low, high = sorted_ends(wide.pow(x.low), wide.pow(x.high))
    # the base is rounded to float32 at worst, and x multiplies that error
    slack = ELEMENTARY * max(x.peak, 1.0) if x.bounded else 0.0
    return widened_once(output_interval(call, low, high), slack, 0.0)


def _either_power(
    call: OpCall, name: str, x: Interval, bounded: Callable[[OpCall, float, Interval], Interval]
) -> Interval:
    """Bound a power of a number, which float32 and 16 bits read differently."""
    intervals = [bounded(call, number, x) for number in call.numbers(name)] or [unbounded(call.shape)]
    return output_interval(
        call,
        reduce(torch.minimum, (each.low for each in intervals)),
        reduce(torch.maximum, (each.high for each in intervals)),
    )


@transfer("square")
def square(call: OpCall) -> Interval:
    """Bound x^2 by the squares of its ends, from 0 if x may be 0."""
    x = call.interval("self")
    low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.square(), x.high.square()))
    return output_interval(call, low, x.magnitude.square())


@transfer("neg", "negative", exact=True)
def negate(call: OpCall) -> Interval:
    """Negate and swap the ends."""
    x = call.interval("self")
    return output_interval(call, -x.high, -x.low, x.norms)


@transfer("abs", "absolute", exact=True)
def absolute(call: OpCall) -> Interval:
    """Bound |x| by the magnitudes of its ends, from 0 if x may be 0."""
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
    """Clamp both ends to the limits, by default -1 and 1."""
    x, least, most = call.interval("self"), call.number("min_val"), call.number("max_val")
    if least is None or most is None or least > most:
        return unbounded(call.shape)
    limits = call.interval("min_val"), call.interval("max_val")
    low, high = torch.maximum(x.low, limits[0].low), torch.maximum(x.high, limits[0].high)
    return output_interval(call, torch.minimum(low, limits[1].low), torch.minimum(high, limits[1].high))


@transfer("maximum", "max.other", "minimum", "min.other", exact=True)
def extreme(call: OpCall) -> Interval:
    """Return the larger, or smaller, of both lower ends, and of both upper ends."""
    choose = torch.maximum if call.name.startswith("max") else torch.minimum
    a, b = call.interval("self"), call.interval("other")
    return output_interval(call, choose(a.low, b.low), choose(a.high, b.high))


@transfer("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar", exact=True)
@transfer("masked_fill.Scalar", "masked_fill.Tensor", exact=True)
def where(call: OpCall) -> Interval:
    """Return the union of both branches, or of the input and the fill value."""
    call.ignore("condition", "mask")
    a, b = call.interval("self"), call.interval("other" if call.name == "where" else "value")
    return output_interval(call, torch.minimum(a.low, b.low), torch.maximum(a.high, b.high))


_COMPARISONS = [f"{op}.{kind}" for op in "eq ne lt le gt ge".split() for kind in ("Tensor", "Scalar")]


@transfer(*_COMPARISONS, "logical_and", "logical_or", "logical_xor", "logical_not", exact=True)
@transfer("isinf", "isnan", "isfinite", exact=True)
def truth(call: OpCall) -> Interval:
    """Bound a truth value by 0 and 1."""
    call.ignore("self", "other")
    return between(call.shape, 0.0, 1.0)


def is_shifted_by_maximum(node: fx.Node, value: Any, shift: Any) -> bool:
    """Return whether ``value - shift`` subtracts a maximum over a set that contains each element."""
    if not isinstance(value, fx.Node) or not isinstance(shift, fx.Node):
        return False
    dtypes = {_dtype(each) for each in (node, value)}
    source = _reduced(_exact(shift), (aten.amax.default, aten.max.dim, aten.max.default))
    # rounding does not make a difference positive
    return source is not None and len(dtypes) == 1 and _exact(source) is _exact(value)


def is_normalized(node: fx.Node, value: Any, factor: Any, *, divided: bool = False) -> Interval | None:
    """Bound ``x * rsqrt(mean(x^2) + eps)`` and ``x / sqrt(mean(x^2) + eps)``: |y_i| <= |y| <= sqrt(n).

    With m the mean as computed in float32, y_i^2 <= x_i^2 / m and m >= (1 - error) sum(x^2) / n. The factor,
    and x beside it, may be rounded to 16 bits, each by at most 2^-8; eps covers squares that vanish.
    """
    if not isinstance(value, fx.Node) or not isinstance(factor, fx.Node):
        return None
    shape = sizes_of(node.meta["val"])
    root = _rounded(factor, beside=value)
    added = _operand(root, aten.sqrt.default if divided else aten.rsqrt.default)
    mean = _plus_eps(added) if added is not None and _dtype(root) is torch.float32 else None
    # in 16 bits a square may vanish, and the bound does not hold
    squares = _reduced(mean, (aten.mean.dim,)) if mean is not None and _dtype(mean) is torch.float32 else None
    source = _square_of(squares) if squares is not None and _dtype(squares) is torch.float32 else None
    if source is None or mean is None or _rounded(source) is not _rounded(value):
        return None
    if sizes_of(value.meta["val"]) != shape or sizes_of(factor.meta["val"]) != sizes_of(mean.meta["val"]):
        return None
    mean_shape = sizes_of(mean.meta["val"]) or (1,) * len(shape)
    axes = [axis for axis, size in enumerate(shape) if size != mean_shape[axis]]
    terms = math.prod(shape[axis] for axis in axes)
    reach = math.sqrt(terms) * (1.0 + SLACK + summation_error(terms + 4)) + SLACK
    interval = symmetric(shape, reach)
    return replace(interval, norms={axes[0]: interval.high} if len(axes) == 1 else {})


def _arguments(node: fx.Node) -> dict[str, Any]:
    return arguments_of(node.target, node) if isinstance(node.target, OpOverload) else {}


def _dtype(node: fx.Node | None) -> torch.dtype | None:
    value = node.meta.get("val") if node is not None else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _exact(node: fx.Node) -> fx.Node:
    """Return the value behind copies and lossless casts."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        dtype = _dtype(node)
        lossless = node.target in _CASTS and dtype is not None and can_represent(dtype, _dtype(source))
        if not (lossless or node.target in _COPIES or is_idle_dropout(node)):
            return node
        node = source
    return node


def _rounded(node: fx.Node, beside: fx.Node | None = None) -> fx.Node:
    """Return the value behind copies and casts, including those to 16 bits (error up to 2^-8).

    A factor may be rounded to float16 only beside a value in float16, which keeps the factor above the
    smallest normal number of float16.
    """
    while True:
        node = _exact(node)
        narrow = _dtype(node) is torch.bfloat16 or (
            _dtype(node) is torch.float16 and (beside is None or _dtype(beside) is torch.float16)
        )
        if node.target not in _CASTS or not narrow or _dtype(node.all_input_nodes[0]) is not torch.float32:
            return node
        node = node.all_input_nodes[0]


def _operand(node: fx.Node | None, op: OpOverload) -> fx.Node | None:
    operand = node.args[0] if node is not None and node.target is op else None
    return operand if isinstance(operand, fx.Node) else None


def _plus_eps(node: fx.Node) -> fx.Node | None:
    """Return the mean in ``mean + eps``."""
    if node.target not in (aten.add.Tensor, aten.add.Scalar) or _dtype(node) is not torch.float32:
        return None
    arguments = _arguments(node)
    mean, eps = arguments["self"], arguments["other"]
    small = isinstance(eps, float) and eps >= MIN_STABLE_EPS and arguments["alpha"] == 1
    return _exact(mean) if small and isinstance(mean, fx.Node) else None


def _reduced(node: fx.Node, ops: tuple[OpOverload, ...]) -> fx.Node | None:
    """Return the input of a reduction, if its axes are kept with size 1 or all axes were reduced."""
    statistic = node
    if statistic.target is aten.unsqueeze.default and isinstance(statistic.args[0], fx.Node):
        node = _exact(statistic.args[0])
    if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target not in ops:
        return None
    arguments = _arguments(node)
    source = arguments["self"]
    if not isinstance(source, fx.Node) or arguments.get("dtype") not in (None, _dtype(source)):
        return None
    shape, dims = sizes_of(source.meta["val"]), arguments.get("dim", [])
    listed = list(dims) if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    axes = {axis % max(len(shape), 1) for axis in listed} or set(range(len(shape)))
    expected = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    over_all = len(axes) == len(shape) and sizes_of(statistic.meta["val"]) == ()
    return source if over_all or _keeps_rows(node, statistic, shape, axes, expected) else None


def _keeps_rows(
    node: fx.Node, statistic: fx.Node, shape: tuple[int, ...], axes: set[int], expected: tuple[int, ...]
) -> bool:
    """Return whether broadcasting aligns each row with its own statistic."""
    if sizes_of(statistic.meta["val"]) != expected:
        return False
    if statistic.target is aten.unsqueeze.default and statistic is not node:
        place = statistic.args[1]
        return isinstance(place, int) and axes == {place % len(shape)}
    return bool(_arguments(node).get("keepdim"))


def _square_of(node: fx.Node) -> fx.Node | None:
    arguments = _arguments(node)
    value = arguments.get("self")
    squared = (
        node.target is aten.square.default
        or (node.target is aten.pow.Tensor_Scalar and arguments["exponent"] in (2, 2.0))
        or (node.target is aten.mul.Tensor and arguments["other"] is value)
    )
    return value if squared and isinstance(value, fx.Node) else None


def _monotone(
    op: str,
    function: Ends,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    start: float = -math.inf,
    shrinks: bool = False,
    absolute: float = 0.0,
    exact: bool = False,
) -> None:
    """Register an increasing function between two limits, which is NaN below ``start``.

    One that ``shrinks`` never exceeds the magnitude of its input, so that norms stay valid. ``absolute`` is
    the error of a library's polynomial near 0.
    """

    @transfer(op, exact=exact)
    def grows(call: OpCall) -> Interval:
        x = call.interval("self")
        if bool((x.low < start).any()):
            return unbounded(call.shape)
        lowest = function(x.low).nan_to_num(low, math.inf, -math.inf).clamp(low, high)
        highest = function(x.high).nan_to_num(high, math.inf, -math.inf).clamp(low, high)
        result = output_interval(call, lowest, highest, x.norms if shrinks else {})
        wide = result if exact else result.widened(ELEMENTARY, absolute)
        # a library's tanh may exceed 1 by one unit of float32
        above = high * (1 + ELEMENTARY) if high > 0 else high
        return replace(wide, low=wide.low.clamp(min=low), high=wide.high.clamp(max=above))


_monotone("exp", torch.exp, 0.0)
_monotone("exp2", torch.exp2, 0.0)
_monotone("expm1", torch.expm1, -1.0)
_monotone("sigmoid", torch.sigmoid, 0.0, 1.0)
_monotone("tanh", torch.tanh, -1.0, 1.0, shrinks=True)
_monotone("erf", torch.erf, -1.0, 1.0, absolute=ELEMENTARY)
_monotone("atan", torch.atan, -math.pi / 2, math.pi / 2)
_monotone("log_sigmoid", F.logsigmoid, -math.inf, 0.0)
_monotone("log", torch.log, start=0.0, absolute=ELEMENTARY)
_monotone("log2", torch.log2, start=0.0, absolute=ELEMENTARY)
_monotone("log10", torch.log10, start=0.0, absolute=ELEMENTARY)
_monotone("log1p", torch.log1p, start=-1.0, absolute=ELEMENTARY)
_monotone("sqrt", torch.sqrt, 0.0, start=0.0)
_monotone("sinh", torch.sinh)
_monotone("asinh", torch.asinh, absolute=ELEMENTARY)
_monotone("hardsigmoid", F.hardsigmoid, 0.0, 1.0)
for _name in ("floor", "ceil", "round", "trunc", "sign"):
    _monotone(_name, getattr(torch, _name), exact=True)
_monotone("relu", torch.relu, 0.0, shrinks=True, exact=True)
_monotone("relu6", F.relu6, 0.0, 6.0, shrinks=True, exact=True)


@transfer("softplus")
def softplus(call: OpCall) -> Interval:
    """Bound softplus with default slope and threshold: at least 0, at most log 2 above max(x, 0)."""
    if call.number("beta") != 1 or call.number("threshold") != 20:
        return unbounded(call.shape)
    x = call.interval("self")
    low, high = torch.log1p(x.low.exp()), torch.maximum(torch.log1p(x.high.exp()), x.high)
    wide = output_interval(call, torch.maximum(low.nan_to_num(0.0, math.inf), x.low.clamp(min=0.0)), high)
    wide = wide.widened(ELEMENTARY, ELEMENTARY)
    return replace(wide, low=wide.low.clamp(min=0.0))


@transfer("rsqrt")
def reciprocal_root(call: OpCall) -> Interval:
    """Bound 1/sqrt(x) for positive x."""
    x = call.interval("self")
    if bool((x.low <= 0).any()):
        return unbounded(call.shape)
    # some kernels round the root to 16 bits before they divide
    slack = ELEMENTARY + 2 * rounding(call.dtype)[0]
    return output_interval(call, torch.rsqrt(x.high), torch.rsqrt(x.low)).widened(slack)


@transfer("reciprocal")
def reciprocal(call: OpCall) -> Interval:
    """Bound 1/x for x away from zero."""
    x = call.interval("self")
    if bool(((x.low <= 0) & (x.high >= 0)).any()):
        return unbounded(call.shape)
    return output_interval(call, 1 / x.high, 1 / x.low).widened(ELEMENTARY)


# minima of activations x * s(x) with 0 <= s <= 1, so that their magnitude is at most |x|
_MINIMA = {"gelu": -0.1701, "silu": -0.2785, "mish": -0.3089, "hardswish": -0.3751}


@transfer(*_MINIMA)
def gated(call: OpCall) -> Interval:
    """Bound GELU, SiLU, Mish and hard swish: |f(x)| <= |x|, f(x) <= max(x, 0), f >= its minimum."""
    call.ignore("approximate")
    x = call.interval("self")
    if x.peak > FLOAT32.max / 8:  # hardswish multiplies by 6 first
        return unbounded(call.shape)
    low = torch.maximum(x.low.clamp(max=0.0), torch.tensor(_MINIMA[call.name], dtype=torch.float64))
    return output_interval(call, low, x.high.clamp(min=0.0), x.norms).widened(ELEMENTARY, ELEMENTARY)


@transfer("leaky_relu")
def leaky_relu(call: OpCall) -> Interval:
    """Bound ``x`` above 0, and ``slope * x`` below."""
    slope, x = call.number("negative_slope"), call.interval("self")
    return unbounded(call.shape) if slope is None else _bent(call, x, slope, slope)


@transfer("prelu")
def prelu(call: OpCall) -> Interval:
    """Bound a leaky ReLU with a known slope per channel."""
    slope, x = call.weight("weight"), call.interval("self")
    if slope is None:
        return unbounded(call.shape)
    low, high = (float(end) for end in torch.aminmax(slope.tensor))
    off = max(abs(low), abs(high)) * slope.relative + slope.absolute
    return _bent(call, x, low - off, high + off)


def _bent(call: OpCall, x: Interval, least: float, most: float) -> Interval:
    """Bound max(x, 0) plus min(x, 0) times a slope between ``least`` and ``most``."""
    below, above = x.low.clamp(max=0.0), x.high.clamp(max=0.0)
    products = [end * slope for end in (below, above) for slope in (least, most)]
    low, high = reduce(torch.minimum, products), reduce(torch.maximum, products)
    passes = x.high > 0
    low = torch.where(x.low >= 0, x.low, torch.where(passes, low.clamp(max=0.0), low))
    high = torch.where(passes, torch.maximum(high, x.high), high)
    return output_interval(call, low, high).widened(ELEMENTARY)


@transfer("elu")
def elu(call: OpCall) -> Interval:
    """Bound ``scale * x`` above 0, and ``scale * alpha * expm1(input_scale * x)`` below."""
    alpha, scale, inner = (call.number(name) for name in ("alpha", "scale", "input_scale"))
    if alpha is None or scale is None or inner is None or inner < 0:
        return unbounded(call.shape)
    return _exponential(call, alpha * scale, inner, scale)


@transfer("celu")
def celu(call: OpCall) -> Interval:
    """Bound max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1), for either sign of alpha."""
    alpha = call.number("alpha")
    if not alpha:
        return unbounded(call.shape)
    return _exponential(call, alpha, 1 / alpha, 1.0)


@transfer("selu")
def selu(call: OpCall) -> Interval:
    """Bound an ELU with fixed constants (Klambauer et al., 2017)."""
    return _exponential(call, 1.7580993408473768, 1.0, 1.0507009873554805)


def _exponential(call: OpCall, alpha: float, inner: float, scale: float) -> Interval:
    """Bound ``scale * x`` above 0 and ``alpha * expm1(inner * x)`` below, each of which is monotone in x."""
    x = call.interval("self")
    if not x.bounded:
        return unbounded(call.shape)
    low, high = sorted_ends(
        *(
            torch.where(end > 0, end * scale, alpha * torch.expm1(end.clamp(max=0.0) * inner))
            for end in (x.low, x.high)
        )
    )
    if alpha * inner < 0 or scale < 0:  # it may turn at 0
        low = torch.where((x.low < 0) & (x.high > 0), low.clamp(max=0.0), low)
        high = torch.where((x.low < 0) & (x.high > 0), high.clamp(min=0.0), high)
    return output_interval(call, low, high).widened(ELEMENTARY, abs(alpha) * ELEMENTARY)


@transfer("sin", "cos")
def sin_cos(call: OpCall) -> Interval:
    """Bound a sine or cosine by 1; it is NaN for an infinite argument."""
    x = call.interval("self")
    return symmetric(call.shape, 1.0 + ELEMENTARY) if x.bounded else unbounded(call.shape)
