"""Transfers of functions of one element: exponentials, logarithms, activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ampaudit.bounds.span import Span, symmetric
from ampaudit.bounds.transfers import ELEMENTARY, OpCall, shaped, transfer

__all__: list[str] = []

Ends = Callable[[torch.Tensor], torch.Tensor]


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
        wide = shaped(call, lowest, highest, norms).widened(ELEMENTARY, absolute)
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
        return symmetric(call.shape, math.inf) if not root else shaped(call, x.low * 0, x.low * 0 + math.inf)
    ends = (torch.rsqrt(x.low), torch.rsqrt(x.high)) if root else (1 / x.low, 1 / x.high)
    return shaped(call, torch.minimum(*ends), torch.maximum(*ends)).widened(ELEMENTARY)


# activations x * s(x) with 0 <= s <= 1: no larger than x, and with a least value of their own
_LEAST = {"gelu": -0.1701, "silu": -0.2785, "mish": -0.3089, "hardswish": -0.3751}


@transfer(*_LEAST)
def gated(call: OpCall) -> Span:
    """GELU, SiLU, Mish, hard swish: |f(x)| <= |x|, f(x) <= max(x, 0), f >= its minimum."""
    x = call.span("self")
    name = str(call.node.target).removeprefix("aten.").split(".")[0].rstrip("_")
    low = torch.maximum(x.low.clamp(max=0.0), torch.tensor(_LEAST[name], dtype=torch.float64))
    return shaped(call, low, x.high.clamp(min=0.0), x.norms).widened(ELEMENTARY)


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
    return shaped(call, x.low.clamp(max=0.0) * least, high * scale).widened(ELEMENTARY)


@transfer("sin", "cos")
def wave(call: OpCall) -> Span:
    """At most 1."""
    return symmetric(call.shape, 1.0 + ELEMENTARY)
