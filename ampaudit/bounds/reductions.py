"""Transfers of sums, means and extremes."""

from __future__ import annotations

import math

import torch

from ampaudit.bounds.span import Span, symmetric
from ampaudit.bounds.transfers import OpCall, accumulated, transfer

__all__: list[str] = []


def _axes(call: OpCall, x: Span) -> list[int]:
    axes = call.given.get("dim")
    if axes is None or axes == []:
        return list(range(len(x.shape)))
    return [axis % max(len(x.shape), 1) for axis in (axes if isinstance(axes, list | tuple) else [axes])]


def _reduced(call: OpCall, ends: torch.Tensor, axes: list[int]) -> torch.Tensor:
    kept = len(call.shape) == ends.ndim
    return ends if kept else ends.squeeze(tuple(axes)) if axes else ends


@transfer("sum", "nansum")
def total(call: OpCall) -> Span:
    """Ends times the number of terms; or what is known of the sum along one axis."""
    x = call.span("self")
    axes = _axes(call, x)
    terms = math.prod(x.shape[axis] for axis in axes)
    low, high = x.low, x.high
    for axis in axes:
        repeat = x.shape[axis] if low.shape[axis] == 1 else 1
        low, high = low.sum(axis, keepdim=True) * repeat, high.sum(axis, keepdim=True) * repeat
    if len(axes) == 1:
        known = x.sum(axes[0])
        low, high = torch.maximum(low, -known), torch.minimum(high, known)
    off = torch.maximum(low.abs(), high.abs()) * accumulated(terms)
    size = x.peak * terms * accumulated(terms)
    off = torch.maximum(off, torch.full_like(off, size)) if math.isfinite(size) else off
    return Span(call.shape, _reduced(call, low - off, axes), _reduced(call, high + off, axes))


@transfer("mean")
def mean(call: OpCall) -> Span:
    """Within the ends."""
    x = call.span("self")
    axes = _axes(call, x)
    low, high = x.low, x.high
    for axis in axes:
        low, high = low.mean(axis, keepdim=True), high.mean(axis, keepdim=True)
    off = x.peak * accumulated(math.prod(x.shape[a] for a in axes) + 1)
    return Span(call.shape, _reduced(call, low - off, axes), _reduced(call, high + off, axes))


@transfer(*(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)))
def pooled(call: OpCall) -> Span:
    """Elements, or means of elements and of zeros of padding: within the ends of their channel."""
    x, name = call.span("self"), str(call.node.target)
    batched = len(x.shape) == int(name[name.index("pool") + 4]) + 2
    if call.has("divisor_override"):
        return symmetric(call.shape, math.inf)
    others = [axis for axis in range(len(x.shape)) if axis != 1 or not batched]
    low, high = x.low.amin(others, keepdim=True), x.high.amax(others, keepdim=True)
    if "max" in name:
        return Span(call.shape, low, high)
    off = x.peak * 2.0**-12
    return Span(call.shape, low.clamp(max=0.0) - off, high.clamp(min=0.0) + off)


@transfer("amax", "amin")
def extreme(call: OpCall) -> Span:
    """The extremes of the ends."""
    x = call.span("self")
    axes = _axes(call, x)
    pick = torch.amax if "amax" in str(call.node.target) else torch.amin
    if not axes:
        return x.only()
    low, high = pick(x.low, axes, keepdim=True), pick(x.high, axes, keepdim=True)
    return Span(call.shape, _reduced(call, low, axes), _reduced(call, high, axes))


@transfer("cumsum")
def running_sum(call: OpCall) -> Span:
    """At most the whole sum, at least nothing."""
    x = call.span("self")
    axis = int(call.given["dim"]) % max(len(x.shape), 1)
    reach = x.sum(axis) * (1 + accumulated(x.shape[axis] if x.shape else 1))
    return symmetric(call.shape, reach)


@transfer("linalg_vector_norm", "norm")
def vector_norm(call: OpCall) -> Span:
    """The L2 norm, from 0 to the root of the summed squares."""
    order = call.given.get("ord", call.given.get("p", 2))
    x = call.span("self")
    axes = _axes(call, x)
    if order not in (2, 2.0) or len(axes) != 1:
        return symmetric(call.shape, math.inf)
    reach = _reduced(call, x.norm(axes[0]) * (1 + accumulated(x.shape[axes[0]])), axes)
    return Span(call.shape, reach * 0, reach)


@transfer("var", "std")
def variance(call: OpCall) -> Span:
    """At most half of the spread, squared, times n/(n-1) (Popoviciu, 1935)."""
    x = call.span("self")
    axes = call.given.get("dim")
    if axes is not None and not isinstance(axes, list | tuple | int):
        return symmetric(call.shape, math.inf)
    chosen = _axes(call, x)
    terms = math.prod(x.shape[axis] for axis in chosen)
    low, high = float(x.low.amin()), float(x.high.amax())
    largest = ((high - low) / 2) ** 2 * (terms / (terms - 1) if terms > 1 else math.inf)
    reach = largest if "var" in str(call.node.target) else math.sqrt(largest)
    found = symmetric(call.shape, reach * (1 + accumulated(terms + 4)))
    return Span(found.shape, found.low * 0, found.high)
