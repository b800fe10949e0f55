"""Transfers of ops that move elements: their ends move the same way, and stay as small as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ampaudit.bounds.span import Axes, Span, between, exactly, symmetric, unbounded
from ampaudit.bounds.transfers import OpCall, transfer

__all__ = ["reshaped"]


def _permuted(x: Span, order: Sequence[int]) -> Span:
    place = {old: new for new, old in enumerate(order)}
    shape = tuple(x.shape[old] for old in order)

    def moved(axes: Axes) -> Axes:
        return {place[axis]: norm.permute(*order) for axis, norm in axes.items()}

    return Span(shape, x.low.permute(*order), x.high.permute(*order), moved(x.norms), moved(x.sums))


@transfer("transpose", "swapaxes", "swapdims")
def transpose(call: OpCall) -> Span:
    """Two axes change places."""
    x = call.span("self")
    names = [name for name in ("dim0", "dim1", "axis0", "axis1") if name in call.given]
    first, second = (int(call.given[name]) % len(x.shape) for name in names)
    order = list(range(len(x.shape)))
    order[first], order[second] = second, first
    return _permuted(x, order)


@transfer("t", "numpy_T", "mT")
def turned(call: OpCall) -> Span:
    """The last two axes change places, or all are reversed."""
    x = call.span("self")
    order = list(range(len(x.shape)))
    if "numpy_T" in str(call.node.target):
        order.reverse()
    elif len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return _permuted(x, order)


@transfer("permute", "movedim")
def permute(call: OpCall) -> Span:
    """Axes are reordered."""
    x = call.span("self")
    if not call.has("dims"):
        return symmetric(call.shape, x.peak)
    return _permuted(x, [int(axis) % len(x.shape) for axis in call.given["dims"]])


@transfer("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as")
@transfer("reshape_as", "expand_as", "ravel", "atleast_2d")
def reshape(call: OpCall) -> Span:
    """Axes are split or merged."""
    name = "self"
    return reshaped(call.span(name), call.shape) if "expand" not in str(call.node.target) else _expanded(call)


def reshaped(x: Span, shape: tuple[int, ...]) -> Span:
    """The span of a value whose axes are split and merged, group by group.

    Ends that are shared along a whole group of axes stay shared; others are written out over that group. The
    norm along the last axis stays a bound where that axis is split, and where it stays as it is.
    """
    if x.shape == shape:
        return x
    low, high = _regrouped(x.low, x.shape, shape), _regrouped(x.high, x.shape, shape)
    norms: Axes = {}
    if x.shape and shape and (len(x.shape) - 1) in x.norms and x.shape[-1] % max(shape[-1], 1) == 0:
        # only where the old last axis ends where the new one ends, and is a multiple of it
        known = x.norms[len(x.shape) - 1]
        if known.numel() == 1 or x.shape[-1] == shape[-1]:
            kept = (*shape[:-1], 1)
            widest = known if known.numel() == 1 else _regrouped(known, (*x.shape[:-1], 1), kept)
            norms = {len(shape) - 1: widest.reshape((1,) * len(shape)) if known.numel() == 1 else widest}
    return Span(shape, low, high, norms)


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
    """Runs of axes with the same product on both sides, as short as possible."""
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


def _expanded(call: OpCall) -> Span:
    x, shape = call.span("self"), call.shape
    shift = len(shape) - len(x.shape)

    def fit(ends: torch.Tensor) -> torch.Tensor:
        return ends.reshape((1,) * shift + tuple(ends.shape))

    same = {axis for axis in range(len(x.shape)) if x.shape[axis] == shape[axis + shift]}
    norms = {axis + shift: fit(norm) for axis, norm in x.norms.items() if axis in same}
    sums = {axis + shift: fit(norm) for axis, norm in x.sums.items() if axis in same}
    return Span(shape, fit(x.low), fit(x.high), norms, sums)


@transfer("expand", "broadcast_to")
def expand(call: OpCall) -> Span:
    """Axes of size 1 are repeated."""
    return _expanded(call)


@transfer("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "dropout", "_to_copy", "to", "type_as")
@transfer("feature_dropout", "positive", "real", "lift_fresh", "detach_copy")
def same(call: OpCall) -> Span:
    """The same values; in training, dropout scales them up."""
    x = call.span("input" if "input" in call.given else "self")
    if "dropout" in str(call.node.target) and call.given.get("train"):
        rate = float(call.given["p"])
        return symmetric(call.shape, x.peak / (1 - rate) if rate < 1 else 0.0)
    value = call.node.meta["val"]
    return x if value.is_floating_point() else _whole(call, x, value.dtype)


def _whole(call: OpCall, x: Span, dtype: torch.dtype) -> Span:
    """A cast to integers drops the fraction; what infinity becomes is not defined, and truth is 0 or 1."""
    if dtype is torch.bool:
        return between(call.shape, 0.0, 1.0)
    if x.peak >= call.limit or dtype.is_complex or x.peak > torch.iinfo(dtype).max:
        return unbounded(call.shape)
    return Span(call.shape, x.low.trunc(), x.high.trunc())


@transfer("slice", "select", "narrow", "index_select", "gather", "index", "roll", "flip", "repeat", "tile")
@transfer("take_along_dim", "diagonal", "tril", "triu", "constant_pad_nd", "pad", "unfold")
@transfer("repeat_interleave", "upsample_nearest2d", "pixel_shuffle")
def chosen(call: OpCall) -> Span:
    """Some of the elements, and perhaps zeros or a fill value: within the ends over the axes that change."""
    name = "input" if "input" in call.given else "self"
    x, shape = call.span(name), call.shape
    fill = call.given.get("value", 0.0)
    reach = abs(float(fill)) if isinstance(fill, int | float) else 0.0
    if len(shape) == len(x.shape):
        axes = [axis for axis in range(len(shape)) if shape[axis] != x.shape[axis]]
        moves = str(call.node.target).split(".")[1].rstrip("_")
        if moves not in ("slice", "narrow"):
            return _hull(x, shape, reach)
        low, high = x.low, x.high
        for axis in axes:
            low, high = low.amin(axis, keepdim=True), high.amax(axis, keepdim=True)
        # a norm along an axis of which a part is taken stays a bound
        norms = {axis: _shared(norm, axes) for axis, norm in x.norms.items()}
        return Span(shape, low, high, norms, {axis: _shared(norm, axes) for axis, norm in x.sums.items()})
    if "select" in str(call.node.target) and "dim" in call.given and len(shape) == len(x.shape) - 1:
        axis = int(call.given["dim"]) % len(x.shape)
        low, high = x.low.amin(axis), x.high.amax(axis)
        norms = {a - (a > axis): n.amax(axis) for a, n in x.norms.items() if a != axis}
        return Span(shape, low, high, norms)
    return _hull(x, shape, reach)


def _shared(norm: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    for axis in axes:
        norm = norm.amax(axis, keepdim=True)
    return norm


def _hull(x: Span, shape: tuple[int, ...], reach: float) -> Span:
    low, high = x.low.amin().clamp(max=-reach), x.high.amax().clamp(min=reach)
    ends = (1,) * len(shape)
    return Span(shape, low.clamp(max=0.0).reshape(ends), high.clamp(min=0.0).reshape(ends))


@transfer("cat", "concat", "stack", "hstack", "vstack")
def joined(call: OpCall) -> Span:
    """Within the ends of all."""
    spans = [_span_of(call, item) for item in call.given["tensors"]]
    low = min((float(s.low.amin()) for s in spans if math.prod(s.shape)), default=0.0)
    high = max((float(s.high.amax()) for s in spans if math.prod(s.shape)), default=0.0)
    return between(call.shape, low, high)


def _span_of(call: OpCall, item: object) -> Span:
    assert isinstance(item, fx.Node)
    found: Span = call.spans[item]
    return found


@transfer("chunk", "split", "split_with_sizes", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split")
def parts(call: OpCall) -> list[Span]:
    """Each part is within the ends; one of a row is no longer than the row."""
    x = call.span("self")
    value = call.node.meta["val"]
    found: list[Span] = []
    start: dict[int, int] = {}
    for item in value:
        shape = tuple(int(n) for n in item.shape)
        if len(shape) != len(x.shape):
            axis = int(call.given.get("dim", 0)) % len(x.shape)
            norms = {a - (a > axis): n.amax(axis) for a, n in x.norms.items() if a != axis}
            found.append(Span(shape, x.low.amin(axis), x.high.amax(axis), norms))
            continue
        axis = int(call.given.get("dim", 0)) % len(x.shape)
        at = start.get(axis, 0)
        start[axis] = at + shape[axis]
        low, high = (
            ends if ends.shape[axis] == 1 else ends.narrow(axis, at, shape[axis]) for ends in (x.low, x.high)
        )
        norms = {a: n if n.shape[axis] == 1 else n.narrow(axis, at, shape[axis]) for a, n in x.norms.items()}
        found.append(Span(shape, low, high, norms))
    return found


@transfer(
    "zeros",
    "ones",
    "full",
    "new_zeros",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_full",
    "new_ones",
    "scalar_tensor",
)
def filled(call: OpCall) -> Span:
    """One value everywhere."""
    name = str(call.node.target)
    value = 0.0 if "zeros" in name else 1.0
    for key in ("fill_value", "s"):
        if key in call.given:
            return _hull_exact(call, call.span(key))
    return _hull_exact(call, exactly(torch.tensor(value)))


def _hull_exact(call: OpCall, x: Span) -> Span:
    ends = (1,) * len(call.shape)
    return Span(call.shape, x.low.amin().reshape(ends), x.high.amax().reshape(ends))


@transfer("arange")
def counted(call: OpCall) -> Span:
    """From the start to the end."""
    numbers = [
        float(v) for k, v in call.given.items() if k in ("start", "end") and isinstance(v, int | float)
    ]
    low, high = min((*numbers, 0.0)), max((*numbers, 0.0))
    return between(call.shape, low, high)
