"""Transfer functions of casts, indexing, padding, concatenation and tensor creation."""

from __future__ import annotations

import math

import torch

from ampaudit.bounds.interval import Interval, between, from_tensor, unbounded
from ampaudit.bounds.stored import stored
from ampaudit.bounds.transfers import OpCall, transfer

__all__: list[str] = []


@transfer("to.dtype", "to.device", "to.dtype_layout", "to.other", "_to_copy", "type_as", exact=True)
def cast(call: OpCall) -> Interval:
    """Keep the values in another dtype; a cast to integers truncates."""
    call.ignore("dtype", "other")
    source = call.arg("self")
    x: Interval = call.intervals[source]
    dtype = call.node.meta["val"].dtype
    if dtype.is_floating_point or not source.meta["val"].is_floating_point():
        return x
    if dtype is torch.bool:
        return between(call.shape, 0.0, 1.0)
    # what infinity and numbers beyond the integers become is not defined: any of them
    return (
        Interval(call.shape, x.low.trunc(), x.high.trunc()) if x.peak < call.limit else unbounded(call.shape)
    )


@transfer("dropout", "feature_dropout", "alpha_dropout")
def dropout(call: OpCall) -> Interval:
    """Keep the values; in training, zero some and scale up the others."""
    rate, training = call.number("p"), call.arg("train")
    x = call.interval("input")
    if not training:
        return x
    if rate is None or not 0 <= rate < 1 or call.name == "alpha_dropout":
        return unbounded(call.shape)
    scale = 1 / (1 - rate) * (1 + 2.0**-7)  # the factor may be rounded to 16 bits
    return Interval(call.shape, x.low.clamp(max=0.0) * scale, x.high.clamp(min=0.0) * scale)


_PICKS = """
index_select gather index.Tensor roll flip repeat tile take_along_dim diagonal unfold pixel_shuffle
pixel_unshuffle repeat_interleave.self_int repeat_interleave.self_Tensor rot90 channel_shuffle movedim.int
movedim.intlist moveaxis.int moveaxis.intlist upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
"""
_HOWEVER = """
dim index indices shifts dims repeats offset dim1 dim2 dimension size step upscale_factor downscale_factor k
scale_factors scales scales_h scales_w scales_d output_size sparse_grad source destination groups
"""


@transfer(*_PICKS.split(), exact=True)
def gather(call: OpCall) -> Interval:
    """Bound any selection of elements by the ends of all."""
    call.ignore(*_HOWEVER.split())
    return _everywhere(call, call.interval("input" if "input" in call.arguments else "self"))


@transfer("tril", "triu", exact=True)
def triangle(call: OpCall) -> Interval:
    """Elements of the input, or zero."""
    call.ignore("diagonal")
    x = call.interval("self")
    return Interval(call.shape, x.low.clamp(max=0.0), x.high.clamp(min=0.0))


@transfer("constant_pad_nd", exact=True)
def constant_pad(call: OpCall) -> Interval:
    """The union of the input's elements and the fill value."""
    call.ignore("pad")
    return _padded(call, call.interval("value"))


@transfer("pad", exact=True)
def pad(call: OpCall) -> Interval:
    """The input's elements, and in constant mode the fill value."""
    call.ignore("pad")
    fill = None
    if call.arg("mode") == "constant":
        fill = (
            call.interval("value") if call.has("value") else from_tensor(torch.zeros((), dtype=torch.float64))
        )
    return _padded(call, fill)


def _padded(call: OpCall, fill: Interval | None) -> Interval:
    x = call.interval("self")
    low, high = float(x.low.amin()), float(x.high.amax())
    if fill is not None:
        low, high = min(low, float(fill.low)), max(high, float(fill.high))
    return between(call.shape, low, high)


@transfer("cat", "concat", "concatenate", "stack", "hstack", "vstack", exact=True, empty=True)
def concat(call: OpCall) -> Interval:
    """The union of all inputs."""
    call.ignore("dim")
    intervals = [interval for interval in call.items("tensors") if math.prod(interval.shape)]
    low = min((float(s.low.amin()) for s in intervals), default=0.0)
    high = max((float(s.high.amax()) for s in intervals), default=0.0)
    return between(call.shape, low, high)


@transfer("zeros", "zeros_like", "new_zeros", "zero", exact=True)
def zeros(call: OpCall) -> Interval:
    """0 everywhere."""
    call.ignore("size", "dtype", "self")
    return between(call.shape, 0.0, 0.0)


@transfer("ones", "ones_like", "new_ones", exact=True)
def ones(call: OpCall) -> Interval:
    """1 everywhere."""
    call.ignore("size", "dtype", "self")
    return between(call.shape, 1.0, 1.0)


@transfer("full", "full_like", "new_full", "fill.Scalar", "fill.Tensor", exact=True)
def full(call: OpCall) -> Interval:
    """One value everywhere."""
    call.ignore("size", "dtype", "self")
    return _everywhere(call, call.interval("value" if "value" in call.arguments else "fill_value"))


@transfer("scalar_tensor", exact=True)
def scalar_tensor(call: OpCall) -> Interval:
    """A number."""
    call.ignore("dtype")
    return _everywhere(call, call.interval("s"))


def _everywhere(call: OpCall, x: Interval) -> Interval:
    return between(call.shape, float(x.low.amin()), float(x.high.amax()))


@transfer("arange", "arange.start", "arange.start_step", integers=True)
def arange(call: OpCall) -> Interval:
    """From the start to the end."""
    call.ignore("dtype", "step")
    start = call.number("start") if "start" in call.arguments else 0.0
    end = call.number("end")
    if start is None or end is None:
        return unbounded(call.shape)
    dtype = call.node.meta["val"].dtype
    return stored(between(call.shape, min(start, end), max(start, end)), dtype)


@transfer("copy")
def copy(call: OpCall) -> Interval:
    """The source's values, broadcast."""
    call.ignore("self")
    return _everywhere(call, call.interval("src"))
