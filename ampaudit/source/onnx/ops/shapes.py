"""Operators that move, cut and join values, and those on shapes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import Known, NodeCall, Operand, check_size

__all__: list[str] = []


def axes_of(call: NodeCall, index: int = 1, since: int = 13) -> list[int] | None:
    """Return the axes of a node, an attribute before the version ``since`` and an input from then on."""
    if call.version < since:
        found = call.attribute("axes")
        return None if found is None else list(found)
    value = call.given(index)
    return None if value is None else call.ints(value)


@operator("Shape")
def shape(call: NodeCall, x: Operand) -> torch.Tensor:
    """Return sizes as a tensor."""
    sizes = list(call.tensor(x).shape)
    return torch.tensor(sizes[call.attribute("start", 0) : call.attribute("end")], dtype=torch.int64)


@operator("Size")
def size(call: NodeCall, x: Operand) -> torch.Tensor:
    """Return the number of elements as a tensor."""
    return torch.tensor(call.tensor(x).numel(), dtype=torch.int64)


@operator("Reshape")
def reshape(call: NodeCall, x: Operand, sizes: Operand = None) -> torch.Tensor:
    """Change the shape; 0 keeps a size."""
    tensor = call.tensor(x)
    wanted = list(call.attribute("shape")) if sizes is None else call.ints(sizes)
    if not call.attribute("allowzero", 0):
        wanted = [tensor.shape[i] if s == 0 else s for i, s in enumerate(wanted)]
    return tensor.reshape(wanted)


@operator("Flatten")
def flatten(call: NodeCall, x: Operand) -> torch.Tensor:
    """Make a matrix."""
    tensor, axis = call.tensor(x), call.attribute("axis", 1)
    axis = axis + tensor.ndim if axis < 0 else axis
    return tensor.reshape(tensor.shape[:axis].numel(), tensor.shape[axis:].numel())


@operator("Transpose")
def transpose(call: NodeCall, x: Operand) -> torch.Tensor:
    """Permute axes."""
    tensor = call.tensor(x)
    order = call.attribute("perm")
    return tensor.permute(list(order) if order is not None else list(range(tensor.ndim))[::-1])


@operator("Squeeze")
def squeeze(call: NodeCall, x: Operand, axes: Operand = None) -> torch.Tensor:
    """Remove axes of size one."""
    tensor, chosen = call.tensor(x), axes_of(call)
    return tensor.squeeze() if chosen is None else tensor.squeeze(tuple(chosen)) if chosen else tensor


@operator("Unsqueeze")
def unsqueeze(call: NodeCall, x: Operand, axes: Operand = None) -> torch.Tensor:
    """Add axes of size one."""
    tensor, chosen = call.tensor(x), axes_of(call) or []
    rank = tensor.ndim + len(chosen)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in chosen):
        tensor = tensor.unsqueeze(axis)
    return tensor


@operator("Expand")
def expand(call: NodeCall, x: Operand, sizes: Operand) -> torch.Tensor:
    """Broadcast in both directions."""
    tensor = call.tensor(x)
    wanted = torch.broadcast_shapes(tensor.shape, tuple(call.ints(sizes)))
    check_size(wanted)
    return tensor.expand(wanted)


@operator("Tile")
def tile(call: NodeCall, x: Operand, repeats: Operand) -> torch.Tensor:
    """Repeat along axes."""
    tensor, times = call.tensor(x), call.ints(repeats)
    check_size([size * count for size, count in zip(tensor.shape, times, strict=False)])
    return tensor.repeat(times)


@operator("Concat")
def concat(call: NodeCall, *values: Operand) -> torch.Tensor:
    """Join along an axis."""
    return torch.cat([call.tensor(value) for value in values], dim=call.attribute("axis"))


@operator("Split")
def split(call: NodeCall, x: Operand, sizes: Operand = None) -> Any:
    """Cut along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    given = call.ints(sizes) if sizes is not None else call.attribute("split")
    if given is None:
        count, length = call.attribute("num_outputs") or len(call.node.outputs), tensor.shape[axis]
        part = -(-length // count)
        given = [min(part, length - part * i) for i in range(count)]
    return tuple(torch.split(tensor, list(given), dim=axis))


@operator("Slice")
def slice_(
    call: NodeCall,
    x: Operand,
    starts: Operand = None,
    ends: Operand = None,
    axes: Operand = None,
    steps: Operand = None,
) -> torch.Tensor:
    """Take ranges along axes."""
    tensor = call.tensor(x)
    if call.version < 10:
        first, last = list(call.attribute("starts")), list(call.attribute("ends"))
        chosen, strides = list(call.attribute("axes") or range(len(first))), [1] * len(first)
    else:
        first, last = call.ints(starts), call.ints(ends)
        chosen = call.ints(axes) if axes is not None else list(range(len(first)))
        strides = call.ints(steps) if steps is not None else [1] * len(first)
    for begin, end, axis, step in zip(first, last, chosen, strides, strict=True):
        tensor = _range_of(tensor, begin, end, axis, step)
    return tensor


def _range_of(tensor: torch.Tensor, begin: int, end: int, axis: int, step: int) -> torch.Tensor:
    length = tensor.shape[axis]
    start, stop, stride = slice(begin, end, step).indices(length)
    if begin < -length and step > 0:
        start = 0
    if end < -length and step < 0:
        stop = -1
    if stride == 1:
        return tensor.narrow(axis, start, max(stop - start, 0))
    index = torch.tensor(list(range(start, stop, stride)), dtype=torch.int64)
    return tensor.index_select(axis, index)


@operator("Gather")
def gather(call: NodeCall, x: Operand, indices: Operand) -> torch.Tensor:
    """Take slices at indices along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    axis = axis + tensor.ndim if axis < 0 else axis
    length = tensor.shape[axis]
    if isinstance(indices, Known) and indices.real.ndim == 0:
        return tensor.select(axis, indices.items()[0])
    index = call.tensor(indices).long()
    if isinstance(indices, Known):
        if any(item < 0 for item in indices.items()):
            index = torch.where(index < 0, index + length, index)
    elif isinstance(x, Known) and axis == 0 and tensor.ndim == 2 and tensor.is_floating_point():
        return torch.embedding(tensor, index)
    else:
        index = torch.where(index < 0, index + length, index)
    made = tensor.index_select(axis, index.reshape(-1))
    return made.reshape([*tensor.shape[:axis], *index.shape, *tensor.shape[axis + 1 :]])


@operator("ConstantOfShape")
def constant_of_shape(call: NodeCall, sizes: Operand) -> torch.Tensor:
    """Fill a new tensor."""
    value, wanted = call.attribute("value"), call.ints(sizes)
    check_size(wanted)
    if value is None:
        return torch.full(wanted, 0.0)
    dtype = call.torch_dtype(value.dtype)  # numpy has no bfloat16
    return torch.full(wanted, torch.frombuffer(bytearray(value.tobytes()), dtype=dtype).item(), dtype=dtype)


@operator("Range")
def range_(call: NodeCall, start: Operand, limit: Operand, delta: Operand) -> torch.Tensor:
    """Count."""
    first, last, step = (call.number(value) for value in (start, limit, delta))
    check_size([math.ceil(abs(last - first) / (abs(step) or 1))])
    return torch.arange(first, last, step, dtype=call.tensor(start).dtype)


@operator("Trilu")
def trilu(call: NodeCall, x: Operand, k: Operand = None) -> torch.Tensor:
    """Keep a triangle."""
    function = torch.triu if call.attribute("upper", 1) else torch.tril
    return function(call.tensor(x), 0 if k is None else int(call.number(k)))


@operator("Pad")
def pad(
    call: NodeCall, x: Operand, pads: Operand = None, value: Operand = None, axes: Operand = None
) -> torch.Tensor:
    """Add values at the borders."""
    tensor, mode = call.tensor(x), str(call.attribute("mode", "constant"))
    given = list(call.attribute("pads")) if call.version < 11 else call.ints(pads)
    chosen = call.ints(axes) if axes is not None else list(range(tensor.ndim))
    half, widths = len(given) // 2, [0] * (2 * tensor.ndim)
    for i, axis in enumerate(chosen):
        last_first = tensor.ndim - 1 - (axis % tensor.ndim)
        widths[2 * last_first], widths[2 * last_first + 1] = given[i], given[half + i]
    check_size([s + sum(widths[2 * i : 2 * i + 2]) for i, s in enumerate(reversed(tensor.shape))])
    if mode != "constant":
        names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
        while widths[-2:] == [0, 0]:
            widths = widths[:-2]
        return torch.nn.functional.pad(tensor, widths, mode=names[mode])
    fill = call.attribute("value", 0.0) if call.version < 11 else 0 if value is None else call.number(value)
    return torch.constant_pad_nd(tensor, widths, fill)
