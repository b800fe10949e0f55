"""Recognizes norms and stable exponentials that are written as several ops.

A pattern matches only if the graph says so: the same value (behind casts that lose nothing), the same axes,
kept as axes of size 1 so that broadcasting brings each row its own statistic, a factor of one, and eps
where it belongs. Everything else does not match.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds.interval import Interval, symmetric
from ampaudit.bounds.stored import format_of
from ampaudit.bounds.transfers import arguments_of, summation_error
from ampaudit.trace.site_table import is_idle_dropout
from ampaudit.trace.values import sizes_of

__all__ = ["is_normalized", "is_shifted_by_maximum"]

SLACK = 2.0**-6
# what a float16 value is rounded by, 2^-25, times 1/sqrt(eps) must stay below the slack
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


def is_shifted_by_maximum(node: fx.Node, value: Any, shift: Any) -> bool:
    """Return whether ``value - shift`` subtracts a maximum over a set that contains each element."""
    if not isinstance(value, fx.Node) or not isinstance(shift, fx.Node):
        return False
    dtypes = {_dtype(each) for each in (node, value)}
    found = _reduced(_exact(shift), (aten.amax.default, aten.max.dim, aten.max.default))
    # the difference of two numbers, rounded, is not positive if the exact one is not
    return found is not None and len(dtypes) == 1 and _exact(found) is _exact(value)


def is_normalized(node: fx.Node, value: Any, factor: Any, *, divided: bool = False) -> Interval | None:
    """``x * rsqrt(mean(x^2) + eps)``, or ``x / sqrt(mean(x^2) + eps)``: |y_i| <= |y| <= sqrt(n).

    With m the mean as computed in float32, y_i^2 <= x_i^2 / m and m >= (1 - error) sum(x^2) / n. The factor,
    and x beside it, may be rounded to 16 bits, each by at most 2^-8; eps bounds what vanishing squares do.
    """
    if not isinstance(value, fx.Node) or not isinstance(factor, fx.Node):
        return None
    shape = sizes_of(node.meta["val"])
    root = _rounded(factor, beside=value)
    added = _operand(root, aten.sqrt.default if divided else aten.rsqrt.default)
    mean = _plus_eps(added) if added is not None and _dtype(root) is torch.float32 else None
    squares = _reduced(mean, (aten.mean.dim,)) if mean is not None and _is_float32(mean) else None
    source = _square_of(squares) if squares is not None and _is_float32(squares) else None
    if source is None or mean is None or _rounded(source) is not _rounded(value):
        return None
    if sizes_of(value.meta["val"]) != shape or sizes_of(factor.meta["val"]) != sizes_of(mean.meta["val"]):
        return None
    kept = sizes_of(mean.meta["val"]) or (1,) * len(shape)
    axes = [axis for axis, size in enumerate(shape) if size != kept[axis]]
    terms = math.prod(shape[axis] for axis in axes)
    reach = math.sqrt(terms) * (1.0 + SLACK + summation_error(terms + 4)) + SLACK
    interval = symmetric(shape, reach)
    return Interval(
        interval.shape, interval.low, interval.high, {axes[0]: interval.high} if len(axes) == 1 else {}
    )


def _arguments(node: fx.Node) -> dict[str, Any]:
    return arguments_of(node.target, node) if isinstance(node.target, OpOverload) else {}


def _dtype(node: fx.Node | None) -> torch.dtype | None:
    value = node.meta.get("val") if node is not None else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_float32(node: fx.Node) -> bool:
    """Return whether the value is float32: in 16 bits a square may vanish, and the bound with it."""
    return _dtype(node) is torch.float32


def _exact(node: fx.Node) -> fx.Node:
    """Return the value behind copies and lossless casts."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        copied = node.target in _COPIES or is_idle_dropout(node)
        if not copied and not (node.target in _CASTS and _keeps_all(_dtype(source), _dtype(node))):
            return node
        node = source
    return node


def _keeps_all(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    if source is target:
        return source is not None
    narrow, wide = format_of(source), format_of(target)
    return narrow is not None and target is torch.float32 and wide is not None


def _rounded(node: fx.Node, beside: fx.Node | None = None) -> fx.Node:
    """Return the value behind copies and casts, including those to 16 bits (error up to 2^-8).

    A factor may only be rounded to float16 beside a value in float16, which keeps the factor above float16's
    smallest normal number.
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
    found = node.args[0] if node is not None and node.target is op else None
    return found if isinstance(found, fx.Node) else None


def _plus_eps(node: fx.Node) -> fx.Node | None:
    """Return the mean in ``mean + eps``."""
    if node.target not in (aten.add.Tensor, aten.add.Scalar) or not _is_float32(node):
        return None
    given = _arguments(node)
    mean, eps = given["self"], given["other"]
    small = isinstance(eps, float) and eps >= MIN_STABLE_EPS and given["alpha"] == 1
    return _exact(mean) if small and isinstance(mean, fx.Node) else None


def _reduced(node: fx.Node, ops: tuple[OpOverload, ...]) -> fx.Node | None:
    """Return the input of a reduction, if its axes are kept with size 1 or all axes were reduced."""
    kept = node
    if kept.target is aten.unsqueeze.default and isinstance(kept.args[0], fx.Node):
        node = _exact(kept.args[0])
    if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target not in ops:
        return None
    given = _arguments(node)
    source = given["self"]
    if not isinstance(source, fx.Node) or given.get("dtype") not in (None, _dtype(source)):
        return None
    shape, dims = sizes_of(source.meta["val"]), given.get("dim", [])
    listed = list(dims) if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    axes = {axis % max(len(shape), 1) for axis in listed} or set(range(len(shape)))
    expected = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    over_all = len(axes) == len(shape) and sizes_of(kept.meta["val"]) == ()
    return source if over_all or _kept_shape(node, kept, shape, axes, expected) else None


def _kept_shape(
    node: fx.Node, kept: fx.Node, shape: tuple[int, ...], axes: set[int], expected: tuple[int, ...]
) -> bool:
    """Return whether each row finds its own statistic when it broadcasts."""
    if sizes_of(kept.meta["val"]) != expected:
        return False
    if kept.target is aten.unsqueeze.default and kept is not node:
        place = kept.args[1]
        return isinstance(place, int) and axes == {place % len(shape)}
    return bool(_arguments(node).get("keepdim"))


def _square_of(node: fx.Node) -> fx.Node | None:
    given = _arguments(node)
    value = given.get("self")
    squared = (
        node.target is aten.square.default
        or (node.target is aten.pow.Tensor_Scalar and given["exponent"] in (2, 2.0))
        or (node.target is aten.mul.Tensor and given["other"] is value)
    )
    return value if squared and isinstance(value, fx.Node) else None
