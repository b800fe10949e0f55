"""Transfer functions of elementwise functions: exponentials, logarithms, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from ampaudit.bounds.elementwise import sorted_ends
from ampaudit.bounds.interval import Interval, symmetric, unbounded
from ampaudit.bounds.stored import rounding
from ampaudit.bounds.transfers import ELEMENTARY, OpCall, output_interval, transfer
from ampaudit.core.formats import FLOAT32

__all__: list[str] = []

Ends = Callable[[torch.Tensor], torch.Tensor]


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
    """Register an increasing function, which maps ends to ends.

    Args:
        op: The op's overload.
        function: The function of its ends.
        low: Smallest value of the function.
        high: Largest value of the function.
        start: Start of its domain, below which it is NaN.
        shrinks: Whether its magnitude never exceeds that of its input, so that norms stay valid.
        absolute: Error of a library's polynomial near 0.
        exact: Whether its values are exact.
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
        return replace(wide, low=wide.low.clamp(min=low), high=wide.high.clamp(max=_above(high)))


def _above(limit: float) -> float:
    """Return the limit with a margin, since a library's tanh may exceed it by one float32."""
    return limit * (1 + ELEMENTARY) if limit > 0 else limit


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
    """Bound the default slope and threshold: at least 0, at most log 2 above max(x, 0)."""
    if call.number("beta") != 1 or call.number("threshold") != 20:
        return unbounded(call.shape)
    x = call.interval("self")
    low, high = torch.log1p(x.low.exp()), torch.maximum(torch.log1p(x.high.exp()), x.high)
    wide = output_interval(call, torch.maximum(low.nan_to_num(0.0, math.inf), x.low.clamp(min=0.0)), high)
    wide = wide.widened(ELEMENTARY, ELEMENTARY)
    return replace(wide, low=wide.low.clamp(min=0.0))


@transfer("rsqrt")
def reciprocal_root(call: OpCall) -> Interval:
    """1/sqrt(x) for positive x."""
    x = call.interval("self")
    if bool((x.low <= 0).any()):
        return unbounded(call.shape)
    # some kernels round the root to 16 bits before they divide
    slack = ELEMENTARY + 2 * rounding(call.dtype)[0]
    return output_interval(call, torch.rsqrt(x.high), torch.rsqrt(x.low)).widened(slack)


@transfer("reciprocal")
def reciprocal(call: OpCall) -> Interval:
    """1/x for x away from zero."""
    x = call.interval("self")
    if bool(((x.low <= 0) & (x.high >= 0)).any()):
        return unbounded(call.shape)
    return output_interval(call, 1 / x.high, 1 / x.low).widened(ELEMENTARY)


# activations x * s(x) with 0 <= s <= 1: no larger than x, and with a least value of their own
_MINIMA = {"gelu": -0.1701, "silu": -0.2785, "mish": -0.3089, "hardswish": -0.3751}


@transfer(*_MINIMA)
def gated(call: OpCall) -> Interval:
    """GELU (either form), SiLU, Mish, hard swish: |f(x)| <= |x|, f(x) <= max(x, 0), f >= its minimum."""
    call.ignore("approximate")
    x = call.interval("self")
    if x.peak > FLOAT32.max / 8:  # hardswish multiplies by 6 first
        return unbounded(call.shape)
    low = torch.maximum(x.low.clamp(max=0.0), torch.tensor(_MINIMA[call.name], dtype=torch.float64))
    return output_interval(call, low, x.high.clamp(min=0.0), x.norms).widened(ELEMENTARY, ELEMENTARY)


@transfer("leaky_relu")
def leaky_relu(call: OpCall) -> Interval:
    """``x`` above 0, and ``slope * x`` below."""
    slope, x = call.number("negative_slope"), call.interval("self")
    return unbounded(call.shape) if slope is None else _bent(call, x, slope, slope)


@transfer("prelu")
def prelu(call: OpCall) -> Interval:
    """A leaky ReLU with a known slope per channel."""
    slope, x = call.weight("weight"), call.interval("self")
    if slope is None:
        return unbounded(call.shape)
    low, high = (float(end) for end in torch.aminmax(slope.tensor))
    off = max(abs(low), abs(high)) * slope.relative + slope.absolute
    return _bent(call, x, low - off, high + off)


def _bent(call: OpCall, x: Interval, least: float, most: float) -> Interval:
    """max(x, 0) plus min(x, 0) times a slope between ``least`` and ``most``."""
    below, above = x.low.clamp(max=0.0), x.high.clamp(max=0.0)
    products = [end * slope for end in (below, above) for slope in (least, most)]
    low, high = products[0], products[0]
    for each in products[1:]:
        low, high = torch.minimum(low, each), torch.maximum(high, each)
    passes = x.high > 0
    low = torch.where(x.low >= 0, x.low, torch.where(passes, low.clamp(max=0.0), low))
    high = torch.where(passes, torch.maximum(high, x.high), high)
    return output_interval(call, low, high).widened(ELEMENTARY)


@transfer("elu")
def elu(call: OpCall) -> Interval:
    """``scale * x`` above 0, and ``scale * alpha * expm1(input_scale * x)`` below."""
    alpha, scale, inner = (call.number(name) for name in ("alpha", "scale", "input_scale"))
    if alpha is None or scale is None or inner is None or inner < 0:
        return unbounded(call.shape)
    return _exponential(call, alpha * scale, inner, scale)


@transfer("celu")
def celu(call: OpCall) -> Interval:
    """max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1), whatever the sign of alpha."""
    alpha = call.number("alpha")
    if not alpha:
        return unbounded(call.shape)
    return _exponential(call, alpha, 1 / alpha, 1.0)


@transfer("selu")
def selu(call: OpCall) -> Interval:
    """An ELU with fixed constants (Klambauer et al., 2017)."""
    return _exponential(call, 1.7580993408473768, 1.0, 1.0507009873554805)


def _exponential(call: OpCall, alpha: float, inner: float, scale: float) -> Interval:
    """``scale * x`` above 0, ``alpha * expm1(inner * x)`` below, which is monotone in x."""
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
    """At most 1; NaN of an infinite argument."""
    x = call.interval("self")
    return symmetric(call.shape, 1.0 + ELEMENTARY) if x.bounded else unbounded(call.shape)
