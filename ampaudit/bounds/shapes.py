"""Transfer functions of ops that move elements, which move the ends of intervals in the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds.interval import Axes, Interval, between, hull, unbounded
from ampaudit.bounds.stored import stored
from ampaudit.bounds.transfers import OpCall, transfer
from ampaudit.trace.functional import OnCopy, functionalized, overload_of, writes_in_place
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.opnames import base_name, may_write, written_values
from ampaudit.trace.values import SharedMemory

_RESIZING = ("resize_", "resize_as_", "set_")  # after these, the values of views of the memory are unknown


@transfer("transpose.int", "swapdims", "swapaxes", "t", "mT", "numpy_T", "permute", moves=True)
def permute(call: OpCall) -> Interval:
    """Reorder the axes: as ``dims`` says, in reverse, or with two of them (the last two) swapped."""
    x = call.interval("self")
    order = list(range(len(x.shape)))
    names = (name for name in ("dim0", "dim1", "axis0", "axis1") if name in call.arguments)
    first, second = [int(call.arg(name)) for name in names] or (-1, -2)
    if call.name == "permute":
        order = [int(axis) % len(x.shape) for axis in call.arg("dims")]
    elif call.name == "numpy_T":
        order.reverse()
    elif len(order) > 1:
        order[first], order[second] = order[second], order[first]
    if not order:
        return x
    place = {old: new for new, old in enumerate(order)}
    shape = tuple(x.shape[old] for old in order)
    norms, sums = ({place[a]: n.permute(*order) for a, n in axes.items()} for axes in (x.norms, x.sums))
    return Interval(shape, x.low.permute(*order), x.high.permute(*order), norms, sums)


_RESHAPES = """
view reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze squeeze squeeze.dim squeeze.dims view_as
reshape_as ravel atleast_1d atleast_2d atleast_3d
"""


@transfer(*_RESHAPES.split(), moves=True)
def reshape(call: OpCall) -> Interval:
    """Split or merge axes, in the order of the elements."""
    # they follow from the shape of the output
    call.ignore("size", "shape", "sizes", "start_dim", "end_dim", "dim", "other")
    return _reshaped(call.interval("self"), call.shape)


def _reshaped(x: Interval, shape: tuple[int, ...]) -> Interval:
    """Return the interval of a value whose axes are split and merged, group by group.

    Ends that are shared along a whole group of axes stay shared; others are expanded over the group. The norm
    along the last axis stays a bound if that axis is split or unchanged.
    """
    if x.shape == shape:
        return x
    low, high = _regrouped(x.low, x.shape, shape), _regrouped(x.high, x.shape, shape)
    norms: Axes = {}
    if x.shape and shape and (len(x.shape) - 1) in x.norms and x.shape[-1] % max(shape[-1], 1) == 0:
        # the old and the new last axis must end together, and the old one be a multiple of the new one
        norm = x.norms[len(x.shape) - 1]
        if norm.numel() == 1 or x.shape[-1] == shape[-1]:
            norm_shape = (*shape[:-1], 1)
            widest = norm if norm.numel() == 1 else _regrouped(norm, (*x.shape[:-1], 1), norm_shape)
            norms = {len(shape) - 1: widest.reshape((1,) * len(shape)) if norm.numel() == 1 else widest}
    return Interval(shape, low, high, norms)


def _regrouped(ends: torch.Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> torch.Tensor:
    if ends.numel() == 1:
        return ends.reshape((1,) * len(new))
    sizes: list[int] = []
    whole: list[int] = []
    for group_old, group_new in _groups(old, new):
        shared = all(ends.shape[axis] == 1 for axis in group_old)
        whole += [1 if shared else old[axis] for axis in group_old]
        sizes += [1 if shared else new[axis] for axis in group_new]
    return ends.expand(whole).reshape(sizes)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return runs of axes with the same product on both sides, as short as possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = math.prod(old[k] for k in left), math.prod(new[k] for k in right)
        i, j = i + len(left), j + len(right)
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                right.append(j - 1)
        groups.append((left, right))
    return groups


@transfer("expand", "broadcast_to", "expand_as", moves=True)
def expand(call: OpCall) -> Interval:
    """Repeat axes of size 1."""
    call.ignore("size", "implicit", "other")
    x, shape = call.interval("self"), call.shape
    shift = len(shape) - len(x.shape)
    new = (None,) * shift
    norms, sums = (
        {a + shift: n[new] for a, n in axes.items() if x.shape[a] == shape[a + shift]}
        for axes in (x.norms, x.sums)
    )
    return Interval(shape, x.low[new], x.high[new], norms, sums)


_COPIES = "contiguous clone detach alias lift_fresh_copy positive lift_fresh detach_copy"


@transfer(*_COPIES.split(), moves=True)
def identity(call: OpCall) -> Interval:
    """Return the values unchanged."""
    return call.interval("self")


@transfer("slice.Tensor", "narrow", moves=True)
def slice_along(call: OpCall) -> Interval:
    """Bound a part of an axis by the ends over that axis; a norm along it stays a bound."""
    call.ignore("start", "end", "step", "length")
    x, axis = call.interval("self"), int(call.arg("dim"))
    if x.shape == call.shape:
        return x
    norms, sums = ({a: n.amax(axis, keepdim=True) for a, n in axes.items()} for axes in (x.norms, x.sums))
    return replace(x.over(axis), shape=call.shape, norms=norms, sums=sums)


@transfer("select.int", moves=True)
def select(call: OpCall) -> Interval:
    """Bound one position of an axis by the ends over that axis."""
    call.ignore("index")
    return _without_axis(call.interval("self"), int(call.arg("dim")), call.shape)


def _without_axis(x: Interval, dim: int, shape: tuple[int, ...]) -> Interval:
    axis = dim % len(x.shape)
    norms = {a - (a > axis): n.amax(axis) for a, n in x.norms.items() if a != axis}
    return Interval(shape, x.low.amin(axis), x.high.amax(axis), norms)


@transfer("unbind.int", moves=True)
def unbind(call: OpCall) -> list[Interval]:
    """Bound each position of an axis by the ends over that axis."""
    x = call.interval("self")
    return [_without_axis(x, int(call.arg("dim")), shape) for shape in call.shapes]


_SPLITS = """
chunk split.Tensor split.sizes split_with_sizes unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes
tensor_split.sections
"""


@transfer(*_SPLITS.split(), moves=True)
def split(call: OpCall) -> list[Interval]:
    """Bound consecutive parts of an axis by their ends; a part is no longer than its row."""
    call.ignore("chunks", "split_size", "split_sizes", "sections")
    x, axis = call.interval("self"), int(call.arg("dim"))
    axis %= max(len(x.shape), 1)
    parts: list[Interval] = []
    start = 0
    for shape in call.shapes:
        low, high = (_part(ends, axis, start, shape[axis]) for ends in (x.low, x.high))
        norms = {a: _part(n, axis, start, shape[axis]) for a, n in x.norms.items()}
        parts.append(Interval(shape, low, high, norms))
        start += shape[axis]
    return parts


def _part(ends: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    return ends if ends.shape[axis] == 1 else ends.narrow(axis, start if size else 0, max(size, 1))


@transfer("tensor_split.indices", moves=True)
def split_at(call: OpCall) -> list[Interval]:
    """Bound parts of an axis that may overlap by the ends over that axis."""
    call.ignore("indices")
    whole = call.interval("self").over(int(call.arg("dim")))
    return [replace(whole, shape=shape) for shape in call.shapes]


def written_memory(graph: fx.Graph, memory: SharedMemory) -> tuple[frozenset[int], frozenset[int]]:
    """Return the memory that in-place ops write to, and the memory that is written in other ways.

    In-place ops that copies have replaced still count. The other ways are resizing, ``out=`` arguments and
    the running statistics of a norm.
    """
    in_place: set[int] = set()
    hidden: set[int] = set()
    for node in graph.nodes:
        op = overload_of(node.target)
        if op is not None and base_name(op) in _RESIZING:
            hidden |= memory.of(node.args[0].meta.get("val"))
        elif isinstance(node.target, OnCopy) or writes_in_place(node):
            in_place |= memory.of(node.args[0].meta.get("val"))
        elif isinstance(node.target, OpOverload) and may_write(node.target):
            for value in written_values(node.target, node.args, dict(node.kwargs)):
                hidden |= memory.of(value.meta.get("val")) if isinstance(value, fx.Node) else set()
    return frozenset(in_place), frozenset(hidden)


def without_visible_writes(traced: TracedModel, memory: SharedMemory) -> TracedModel:
    """Replace the in-place ops of a model, if an overwritten value is read later.

    ``relu_(x)`` on an x without other readers is equivalent to ``relu(x)``, and needs no copy of the graph.
    """
    return functionalized(traced) if any(_overwritten_reads(traced.graph, memory)) else traced


def _overwritten_reads(graph: fx.Graph, memory: SharedMemory) -> Iterator[bool]:
    """Yield for each in-place op whether an earlier value of the same memory is read after it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if writes_in_place(node)]
    if not writes:
        return
    places = {write: memory.of(write.args[0].meta.get("val")) for write in writes}
    write_memory = frozenset().union(*places.values())
    values = [
        (node, shared) for node in graph.nodes if (shared := memory.of(node.meta.get("val")) & write_memory)
    ]
    for write, place in places.items():
        earlier = [node for node, shared in values if shared & place and order[node] < order[write]]
        yield any(order[user] > order[write] for node in earlier for user in node.users)


@transfer("to.dtype", "to.device", "to.dtype_layout", "to.other", "_to_copy", "type_as", exact=True)
def cast(call: OpCall) -> Interval:
    """Keep the ends in another dtype; a cast to integers truncates them."""
    call.ignore("dtype", "other")
    source = call.arg("self")
    x: Interval = call.intervals[source]
    dtype = call.node.meta["val"].dtype
    if dtype.is_complex:
        return unbounded(call.shape)
    if dtype.is_floating_point or not source.meta["val"].is_floating_point():
        return x
    if dtype is torch.bool:
        return between(call.shape, 0.0, 1.0)
    # casts of infinity and of numbers beyond the integers are undefined and may give any integer
    return (
        Interval(call.shape, x.low.trunc(), x.high.trunc()) if x.peak < call.limit else unbounded(call.shape)
    )


@transfer("dropout", "feature_dropout", "alpha_dropout")
def dropout(call: OpCall) -> Interval:
    """Keep the ends; in training, some values become zero and others are scaled up."""
    rate, training = call.number("p"), call.arg("train")
    x = call.interval("input")
    if not training:
        return x
    if rate is None or not 0 <= rate < 1 or call.name == "alpha_dropout":
        return unbounded(call.shape)
    scale = 1 / (1 - rate) * (1 + 2.0**-7)  # the factor may be rounded to 16 bits
    return Interval(call.shape, x.low.clamp(max=0.0) * scale, x.high.clamp(min=0.0) * scale)


_SELECTIONS = """
index_select gather index.Tensor roll flip repeat tile take_along_dim diagonal unfold pixel_shuffle
pixel_unshuffle repeat_interleave.self_int repeat_interleave.self_Tensor rot90 channel_shuffle movedim.int
movedim.intlist moveaxis.int moveaxis.intlist upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
"""
_SELECTING_ARGUMENTS = """
dim index indices shifts dims repeats offset dim1 dim2 dimension size step upscale_factor downscale_factor k
scale_factors scales scales_h scales_w scales_d output_size sparse_grad source destination groups
"""


@transfer(*_SELECTIONS.split(), exact=True)
def gather(call: OpCall) -> Interval:
    """Bound any selection of elements by the ends of all elements."""
    call.ignore(*_SELECTING_ARGUMENTS.split())
    return hull(call.shape, call.interval("input" if "input" in call.arguments else "self"))


@transfer("tril", "triu", exact=True)
def triangle(call: OpCall) -> Interval:
    """Return the union of the input's elements and zero."""
    call.ignore("diagonal")
    x = call.interval("self")
    return Interval(call.shape, x.low.clamp(max=0.0), x.high.clamp(min=0.0))


@transfer("constant_pad_nd", "pad", exact=True)
def pad(call: OpCall) -> Interval:
    """Return the union of the input's elements and, in constant mode, the fill value."""
    call.ignore("pad")
    x = call.interval("self")
    if call.name == "pad" and call.arg("mode") != "constant":
        return hull(call.shape, x)
    return hull(call.shape, x, call.interval("value") if call.has("value") else between((), 0.0, 0.0))


@transfer("cat", "concat", "concatenate", "stack", "hstack", "vstack", exact=True, empty=True)
def concat(call: OpCall) -> Interval:
    """Return the union of all inputs."""
    call.ignore("dim")
    return hull(call.shape, *call.items("tensors"))


@transfer("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones", exact=True)
def zeros_or_ones(call: OpCall) -> Interval:
    """Bound a tensor of zeros, or of ones."""
    call.ignore("size", "dtype", "self")
    number = 1.0 if "ones" in call.name else 0.0
    return between(call.shape, number, number)


@transfer("full", "full_like", "new_full", "fill.Scalar", "fill.Tensor", "scalar_tensor", exact=True)
def full(call: OpCall) -> Interval:
    """Bound a tensor of one number."""
    call.ignore("size", "dtype", "self")
    name = next(name for name in ("value", "fill_value", "s") if name in call.arguments)
    return hull(call.shape, call.interval(name))


@transfer("arange", "arange.start", "arange.start_step", integers=True)
def arange(call: OpCall) -> Interval:
    """Bound a range by its start and end."""
    call.ignore("dtype", "step")
    start = call.number("start") if "start" in call.arguments else 0.0
    end = call.number("end")
    if start is None or end is None:
        return unbounded(call.shape)
    dtype = call.node.meta["val"].dtype
    return stored(between(call.shape, min(start, end), max(start, end)), dtype)


@transfer("copy")
def copy(call: OpCall) -> Interval:
    """Bound by the source's values, which are broadcast."""
    call.ignore("self")
    return hull(call.shape, call.interval("src"))
