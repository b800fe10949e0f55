"""Transfer functions of sums, means, extremes and pools."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampaudit.bounds.interval import Interval, between, unbounded
from ampaudit.bounds.stored import rounding
from ampaudit.bounds.transfers import ELEMENTARY, MAX_ROOT, OpCall, output_interval, summation_error, transfer
from ampaudit.core.formats import FLOAT32
from ampaudit.trace.values import sizes_of


@dataclass(frozen=True, slots=True)
class _Rows:
    """An operand and its reduced axes; a scalar is a row of one element."""

    x: Interval
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def terms(self) -> int:
        """The number of elements that are reduced to one."""
        return math.prod(self.x.shape[axis] for axis in self.axes)

    def result(self, low: torch.Tensor, high: torch.Tensor) -> Interval:
        """Return the interval of the output from ends that keep the reduced axes."""
        if low.ndim != len(self.shape):
            sizes = [size for axis, size in enumerate(low.shape) if axis not in self.axes]
            low, high = low.reshape(sizes), high.reshape(sizes)
        return Interval(self.shape, low, high)


def _rows(call: OpCall, shape: tuple[int, ...] | None = None) -> _Rows:
    x, shape = call.interval("self"), call.shape if shape is None else shape
    call.ignore("keepdim")  # follows from the shape of the output
    if not x.shape:
        x = Interval((1,), x.low.reshape(1), x.high.reshape(1))
    dims = call.arg("dim") if "dim" in call.arguments else None
    listed = list(dims) if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    axes = tuple(sorted({int(axis) % len(x.shape) for axis in listed})) or tuple(range(len(x.shape)))
    return _Rows(x, axes, shape)


@transfer("sum", "sum.dim_IntList", integers=True)
def total(call: OpCall) -> Interval:
    """Multiply the ends by the number of terms, or use a known bound of the sum."""
    rows = _rows(call)
    x, axes = rows.x, rows.axes
    low, high = x.low, x.high
    for axis in axes:
        repeat = x.shape[axis] if low.shape[axis] == 1 else 1
        low, high = low.sum(axis, keepdim=True) * repeat, high.sum(axis, keepdim=True) * repeat
    if len(axes) == 1:
        limit = x.sum(axes[0])
        low, high = torch.maximum(low, -limit), torch.minimum(high, limit)
    if not call.dtype.is_floating_point:
        return rows.result(low, high)
    if x.peak * rows.terms >= FLOAT32.max:
        return unbounded(call.shape)
    off = x.peak * rows.terms * summation_error(rows.terms)
    return _signed(x, rows.result(low - off, high + off))


def _signed(x: Interval, result: Interval) -> Interval:
    """Keep the sum of non-negative numbers non-negative under any rounding."""
    natural, negative = bool((x.low >= 0).all()), bool((x.high <= 0).all())
    low = result.low.clamp(min=0.0) if natural else result.low
    return replace(result, low=low, high=result.high.clamp(max=0.0) if negative else result.high)


@transfer("mean", "mean.dim")
def mean(call: OpCall) -> Interval:
    """Bound a mean by the means of the ends."""
    rows = _rows(call)
    x, low, high = rows.x, rows.x.low, rows.x.high
    for axis in rows.axes:
        low, high = low.mean(axis, keepdim=True), high.mean(axis, keepdim=True)
    if x.peak * rows.terms >= FLOAT32.max:
        return unbounded(call.shape)
    off = x.peak * summation_error(rows.terms + 1)
    return _signed(x, rows.result(low - off, high + off))


@transfer("amax", "max", "amin", "min", exact=True)
def extreme(call: OpCall) -> Interval:
    """Return the largest, or smallest, of the lower ends, and of the upper ends."""
    rows, choose = _rows(call), torch.amax if "max" in call.name else torch.amin
    return rows.result(*(choose(ends, rows.axes, keepdim=True) for ends in (rows.x.low, rows.x.high)))


@transfer("max.dim", "min.dim")
def extreme_and_index(call: OpCall) -> list[Interval]:
    """Bound the largest or smallest element along an axis, and its position."""
    return [extreme(call), between(call.shapes[1], 0.0, float(max(_rows(call).terms - 1, 0)))]


@transfer("argmax", "argmin", integers=True)
def index_of_extreme(call: OpCall) -> Interval:
    """Bound a position along an axis, or in the whole value."""
    call.ignore("self", "dim", "keepdim")
    size = math.prod(sizes_of(call.arg("self").meta["val"]))
    return between(call.shape, 0.0, float(max(size - 1, 0)))


@transfer("sort", "sort.stable", "topk")
def ordered(call: OpCall) -> list[Interval]:
    """Bound elements of the input, and their positions along an axis."""
    call.ignore("descending", "stable", "k", "largest", "sorted")
    x = call.interval("self")
    axis = int(call.arg("dim"))
    values, indices = call.shapes
    rows = x.over(axis) if x.shape else x
    positions = x.shape[axis] if x.shape else 1
    return [Interval(values, rows.low, rows.high), between(indices, 0.0, float(max(positions - 1, 0)))]


@transfer("cumsum", integers=True)
def running_sum(call: OpCall) -> Interval:
    """Bound by the sum of all magnitudes; a GPU accumulates in the dtype of the output."""
    x, dim = call.interval("self"), call.number("dim")
    if dim is None:
        return unbounded(call.shape)
    terms = x.shape[int(dim)] if x.shape else 1
    unit = rounding(call.dtype)[0] if call.dtype.is_floating_point else 0.0
    if terms * unit >= 0.5:
        return unbounded(call.shape)
    reach = (x.sum(int(dim)) if x.shape else x.magnitude) * (1 + terms * unit / (1 - terms * unit))
    zero = torch.zeros((), dtype=torch.float64)
    low = zero if bool((x.low >= 0).all()) else -reach
    high = zero if bool((x.high <= 0).all()) else reach
    return output_interval(call, *torch.broadcast_tensors(low, high))


@transfer("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def norm(call: OpCall) -> Interval:
    """Bound the L2 norm along an axis by 0 and the root of the summed squares."""
    if call.arg("ord" if "ord" in call.arguments else "p") not in (2, None):
        return unbounded(call.shape)
    rows = _rows(call)
    if len(rows.axes) == 1:
        reach = rows.x.norm(rows.axes[0])
    else:
        reach = torch.full((1,) * len(rows.x.shape), rows.x.peak * math.sqrt(rows.terms), dtype=torch.float64)
    reach = reach * (1 + summation_error(rows.terms))
    if not bool((reach < MAX_ROOT).all()):
        return unbounded(call.shape)
    return rows.result(reach * 0, reach)


@transfer("var.correction", "std.correction", "var.dim", "std.dim", "var", "std")
def variance(call: OpCall) -> Interval:
    """Bound by the squared half spread times n/(n - correction) (Popoviciu, 1935)."""
    return _variance(call, call.shape, root=call.name == "std")


@transfer("var_mean.correction", "std_mean.correction", "var_mean.dim", "std_mean.dim")
def variance_and_mean(call: OpCall) -> list[Interval]:
    """Bound a variance, and a mean by the ends."""
    first, rows = _variance(call, call.shapes[0], root=call.name == "std_mean"), _rows(call, call.shapes[1])
    if not first.bounded:
        return [first, unbounded(rows.shape)]
    off = rows.x.peak * summation_error(rows.terms + 1)
    low, high = float(rows.x.low.amin()) - off, float(rows.x.high.amax()) + off
    return [first, between(rows.shape, low, high)]


def _variance(call: OpCall, shape: tuple[int, ...], *, root: bool) -> Interval:
    rows = _rows(call, shape)
    named = "correction" in call.arguments
    correction = call.number("correction") if named else float(bool(call.arg("unbiased")))
    freedom = rows.terms - (1.0 if correction is None else correction)
    if freedom <= 0 or rows.x.peak * math.sqrt(rows.terms) >= MAX_ROOT:
        return unbounded(shape)
    # the error of the mean is a few roundings, and in a constant row the whole spread
    spread = float(rows.x.high.amax() - rows.x.low.amin()) / 2 + rows.x.peak * summation_error(rows.terms + 4)
    reach = spread * math.sqrt(rows.terms / freedom) * (1 + summation_error(rows.terms + 4) + ELEMENTARY)
    return between(shape, 0.0, reach if root else reach * reach)


def _per_channel(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    x = call.interval("self")
    batched = len(x.shape) == _dimensions(call) + 2
    others = [axis for axis in range(len(x.shape)) if axis != 1 or not batched]
    return x.low.amin(others, keepdim=True), x.high.amax(others, keepdim=True)


def _dimensions(call: OpCall) -> int:
    return int(call.name.partition("pool")[2][0])


def _may_miss_input(call: OpCall) -> bool:
    """Return whether a window may lie entirely in the padding, so that its maximum is -inf."""
    call.ignore("kernel_size", "stride", "ceil_mode")
    gaps, padding = call.arg("dilation") or 1, call.arg("padding") or 0
    return not (_all_are(1, gaps) or _all_are(0, padding))


def _all_are(number: int, value: Any) -> bool:
    return all(item == number for item in (value if isinstance(value, list | tuple) else [value]))


@transfer("max_pool1d", "max_pool2d", "max_pool3d", exact=True)
def max_pool(call: OpCall) -> Interval:
    """Bound elements of the input; none is replaced by padding."""
    if _may_miss_input(call):
        return unbounded(call.shape)
    return Interval(call.shape, *_per_channel(call))


@transfer(*(name for n in (1, 2, 3) for name in (f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d")))
def max_pool_with_indices(call: OpCall) -> list[Interval]:
    """Bound elements of the input, and their positions within a channel."""
    call.ignore("output_size")
    if _may_miss_input(call):
        return [unbounded(shape) for shape in call.shapes]
    values, indices = call.shapes
    positions = math.prod(call.arg("self").meta["val"].shape[-_dimensions(call) :])
    return [Interval(values, *_per_channel(call)), between(indices, 0.0, float(max(positions - 1, 0)))]


_MEAN_POOLS = [f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)]


@transfer(*_MEAN_POOLS)
def mean_pool(call: OpCall) -> Interval:
    """Bound means of elements, and of the zeros of padding where they count."""
    call.ignore("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "output_size")
    low, high = _per_channel(call)
    x = call.interval("self")
    spatial = call.arg("self").meta["val"].shape[-_dimensions(call) :]
    window = call.arg("kernel_size") if "kernel_size" in call.arguments else spatial
    sizes = list(window) if isinstance(window, list | tuple | torch.Size) else [window]
    terms = math.prod(sizes) if len(sizes) == len(spatial) else int(sizes[0]) ** len(spatial)
    if x.peak * terms >= FLOAT32.max:
        return unbounded(call.shape)
    off = x.peak * max(summation_error(terms + 2), 2.0**-12)
    natural = bool((x.low >= 0).all())
    low = low.clamp(max=0.0) - off
    return Interval(call.shape, low.clamp(min=0.0) if natural else low, high.clamp(min=0.0) + off)
