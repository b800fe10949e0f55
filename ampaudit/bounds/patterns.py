"""Norms and stable exponentials that are written out in several ops, recognised by how values flow."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ampaudit.bounds.span import Span, symmetric
from ampaudit.bounds.transfers import OpCall
from ampaudit.trace import Site
from ampaudit.trace.sizes import sizes_of

__all__ = ["normalized_row", "shifted_by_maximum"]

SLACK = 2.0**-6
LEAST_EPS = 1e-14


def normalized_row(call: OpCall) -> Span | None:
    """``x * rsqrt(mean(x^2) + eps)``: as in an RMS norm, |y_i| <= |y| <= sqrt(n).

    With m the mean as computed in float32, y_i^2 <= x_i^2 / m and m >= (1 - error) sum(x^2) / n. The factor,
    and x beside it, may be rounded to 16 bits, each by at most 2^-8; eps bounds what vanishing squares do.
    """
    for value, factor in (("self", "other"), ("other", "self")):
        found = _mean_square(call, call.given[value], call.given[factor])
        if found is None:
            continue
        axis, size = found
        rank = len(call.shape)
        if rank == 0 or call.shape[axis] != size:
            return None
        span = symmetric(call.shape, math.sqrt(size) * (1.0 + SLACK) + SLACK)
        return Span(span.shape, span.low, span.high, {axis % rank: span.high})
    return None


def _mean_square(call: OpCall, value: Any, factor: Any) -> tuple[int, int] | None:
    """The axis and length of the mean in ``rsqrt(mean(value^2) + eps)``."""
    flow = call.flow
    root = flow.made_by(factor, "rsqrt") if isinstance(factor, fx.Node) else None
    if root is None or not isinstance(value, fx.Node):
        return None
    inner = flow.node(root).all_input_nodes[0]
    added = flow.made_by(inner, "add")
    mean = flow.made_by(flow.node(added).all_input_nodes[0] if added else inner, "mean")
    eps = flow.arguments(added).get("other") if added else None
    if mean is None or not isinstance(eps, float) or eps < LEAST_EPS:
        return None
    if any(site is not None and not _is_float32(site) for site in (root, added, mean)):
        return None
    given = flow.arguments(mean)
    axes = given.get("dim")
    if not isinstance(axes, list | tuple) or len(axes) != 1:
        return None
    squared = flow.maker(given["self"])
    if squared is None or not _is_float32(squared) or not _squares(call, squared, value):
        return None
    return int(axes[0]), sizes_of(given["self"].meta["val"])[axes[0]]


def _is_float32(site: Site) -> bool:
    """In 16 bits a square may vanish, and the bound with it."""
    return str(site.dtype) == "torch.float32"


def _squares(call: OpCall, site: Site, value: fx.Node) -> bool:
    flow = call.flow
    given = flow.arguments(site)
    source = flow.root(value)
    if flow.base(site) == "pow":
        return given.get("exponent") in (2, 2.0) and flow.root(given["self"]) is source
    if flow.base(site) == "square":
        return flow.root(given["self"]) is source
    both = (given.get("self"), given.get("other"))
    return flow.base(site) == "mul" and all(flow.root(node) is source for node in both)


def shifted_by_maximum(call: OpCall) -> bool:
    """``x - amax(x)``, which is never positive."""
    flow, x, other = call.flow, call.given["self"], call.given["other"]
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node):
        return False
    maximum = flow.made_by(other, "amax", "max")
    return maximum is not None and flow.root(flow.node(maximum).all_input_nodes[0]) is flow.root(x)
