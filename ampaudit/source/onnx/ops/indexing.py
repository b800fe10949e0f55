"""Indexing and reshaping operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampaudit.source.onnx.ops.elementwise import dtype_attribute
from ampaudit.source.onnx.values import Known, NodeCall, Operand, check_size, operator

_REDUCTIONS = {"mul": "prod", "min": "amin", "max": "amax"}


@operator("GatherElements")
def gather_elements(call: NodeCall, x: Tensor, indices: Tensor) -> Tensor:
    """Gather an element for each index along an axis."""
    axis = call.attribute("axis", 0)
    return torch.gather(x, axis, _from_start(indices.long(), x.shape[axis]))


def _from_start(index: Tensor, size: int | Tensor) -> Tensor:
    """Convert negative indices, which count from the end of an axis of this size."""
    return torch.where(index < 0, index + size, index)


@operator("GatherND")
def gather_nd(call: NodeCall, x: Tensor, indices: Tensor) -> Tensor:
    """Gather slices at tuples of indices."""
    batch = call.attribute("batch_dims", 0)
    index = _from_start(indices.long(), torch.tensor(x.shape[batch : batch + indices.shape[-1]]))
    grids = [_along(torch.arange(x.shape[axis]), axis, index.ndim - 1) for axis in range(batch)]
    return x[(*grids, *index.unbind(-1))]


def _along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Reshape a vector to a rank, with its elements along one axis."""
    return vector.reshape([-1 if a == axis else 1 for a in range(rank)])


@operator("ScatterElements", "Scatter")
def scatter_elements(call: NodeCall, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Scatter an element to each index along an axis."""
    axis, how = call.attribute("axis", 0), call.attribute("reduction", "none")
    index = _from_start(indices.long(), x.shape[axis])
    if how == "none":
        return torch.scatter(x, axis, index, updates)
    if how == "add":
        return torch.scatter_add(x, axis, index, updates)
    return torch.scatter_reduce(x, axis, index, updates, _REDUCTIONS[how])


@operator("ScatterND")
def scatter_nd(call: NodeCall, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Scatter slices to tuples of indices."""
    width, how = indices.shape[-1], call.attribute("reduction", "none")
    index = _from_start(indices.long(), torch.tensor(x.shape[:width]))
    if how in ("none", "add"):
        return torch.index_put(x, index.unbind(-1), updates, accumulate=how == "add")
    strides = [x.shape[i + 1 : width].numel() for i in range(width)]
    flat = (index * torch.tensor(strides)).sum(-1).reshape(-1)
    rest = x.shape[width:]
    new = updates.reshape(-1, *rest)
    places = _along(flat, 0, new.ndim).expand_as(new)
    return x.reshape(-1, *rest).scatter_reduce(0, places, new, _REDUCTIONS[how]).reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(call: NodeCall, x: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """Write an update along an axis, starting at an index for each element of the batch."""
    axis = call.attribute("axis", -2) % x.ndim
    steps = _along(torch.arange(update.shape[axis]), axis, x.ndim)
    if starts is not None:
        steps = steps + _along(starts, 0, x.ndim)
    if call.attribute("mode") == "circular":
        steps = steps % x.shape[axis]
    return torch.scatter(x, axis, steps.expand_as(update), update)


@operator("Compress")
def compress(call: NodeCall, x: Tensor, condition: Operand) -> Tensor:
    """Select the slices for which a condition holds."""
    axis = call.attribute("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    if isinstance(condition, Known) and not call.real:
        places = torch.tensor([i for i, keep in enumerate(condition.items()) if keep], dtype=torch.int64)
    else:
        places = torch.nonzero(call.tensor(condition)).reshape(-1)
    return x.index_select(axis, places)


@operator("Unique")
def unique(call: NodeCall, x: Tensor) -> Any:
    """Return the distinct elements or slices, their first positions, inverse indices and counts."""
    axis = call.attribute("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    values, places, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    places = places.reshape(-1)
    steps = torch.arange(places.shape[0])
    first = torch.full_like(counts, places.shape[0]).scatter_reduce(0, places, steps, "amin")
    if call.attribute("sorted", 1):
        return values, first, places, counts
    order = torch.argsort(first)
    return values.index_select(axis, order), first[order], torch.argsort(order)[places], counts[order]


@operator("OneHot")
def one_hot(call: NodeCall, index: Tensor, depth: Operand, values: Tensor) -> Tensor:
    """Encode indices as one-hot vectors."""
    count, rank = int(call.floats(depth)[0]), index.ndim + 1
    axis = call.attribute("axis", -1) % rank
    check_size([*index.shape, count])
    steps = _along(torch.arange(count), axis, rank)
    index = _from_start(index, count).unsqueeze(axis)
    return torch.where(index == steps, values[1], values[0])


@operator("EyeLike")
def eye_like(call: NodeCall, x: Tensor) -> Any:
    """Return a matrix with ones on a diagonal."""
    rows, columns = (torch.arange(size) for size in x.shape)
    ones = rows.unsqueeze(1) + call.attribute("k", 0) == columns
    return ones.to(dtype_attribute(call, "dtype", x.dtype))


def axes_of(call: NodeCall, since: int = 13) -> list[int] | None:
    """Return the axes of a node: an attribute before the operator's version ``since``, then an input."""
    if call.version < since:
        axes: list[int] | None = call.attribute("axes")
        return axes
    value = call.inputs[1] if len(call.inputs) > 1 else None
    return None if value is None else call.ints(value)


@operator("Shape")
def shape(call: NodeCall, x: Tensor) -> Tensor:
    """Return the shape as a tensor."""
    return torch.tensor(list(x.shape)[call.attribute("start", 0) : call.attribute("end")], dtype=torch.int64)


@operator("Size")
def size(call: NodeCall, x: Tensor) -> Tensor:
    """Return the number of elements as a tensor."""
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape")
def reshape(call: NodeCall, x: Tensor, sizes: Operand = None) -> Tensor:
    """Change the shape; a 0 copies the size of the input unless ``allowzero`` is set."""
    target = call.attribute("shape") if sizes is None else call.ints(sizes)
    if not call.attribute("allowzero", 0):
        target = [x.shape[i] if s == 0 else s for i, s in enumerate(target)]
    return x.reshape(target)


@operator("Flatten")
def flatten(call: NodeCall, x: Tensor) -> Tensor:
    """Flatten to a matrix."""
    axis = call.attribute("axis", 1)
    return x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel())


@operator("Transpose")
def transpose(call: NodeCall, x: Tensor) -> Tensor:
    """Permute axes."""
    return x.permute(call.attribute("perm", list(range(x.ndim))[::-1]))


@operator("Squeeze")
def squeeze(call: NodeCall, x: Tensor, axes: Operand = None) -> Tensor:
    """Remove axes of size one."""
    dims = axes_of(call)
    return x.squeeze() if dims is None else x.squeeze(tuple(dims)) if dims else x


@operator("Unsqueeze")
def unsqueeze(call: NodeCall, x: Tensor, axes: Operand = None) -> Tensor:
    """Add axes of size one."""
    dims = axes_of(call) or []
    rank = x.ndim + len(dims)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in dims):
        x = x.unsqueeze(axis)
    return x


@operator("Expand")
def expand(call: NodeCall, x: Tensor, sizes: Operand) -> Tensor:
    """Broadcast to a shape; where it has a 1, the size of the input stays."""
    target = torch.broadcast_shapes(x.shape, tuple(call.ints(sizes)))
    check_size(target)
    return x.expand(target)


@operator("Tile")
def tile(call: NodeCall, x: Tensor, repeats: Operand) -> Tensor:
    """Repeat along axes."""
    times = call.ints(repeats)
    check_size([size * count for size, count in zip(x.shape, times, strict=False)])
    return x.repeat(times)


@operator("Concat")
def concat(call: NodeCall, *values: Tensor) -> Tensor:
    """Concatenate along an axis."""
    return torch.cat(values, dim=call.attribute("axis"))


@operator("Split")
def split(call: NodeCall, x: Tensor, sizes: Operand = None) -> Any:
    """Split along an axis."""
    axis = call.attribute("axis", 0)
    lengths = call.ints(sizes) if sizes is not None else call.attribute("split")
    if lengths is None:
        count, length = call.attribute("num_outputs") or len(call.node.outputs), x.shape[axis]
        part = -(-length // count)
        lengths = [min(part, length - part * i) for i in range(count)]
    return tuple(torch.split(x, lengths, dim=axis))


@operator("Slice")
def slice_(
    call: NodeCall,
    x: Tensor,
    starts: Operand = None,
    ends: Operand = None,
    axes: Operand = None,
    steps: Operand = None,
) -> Tensor:
    """Slice along axes."""
    if call.version < 10:
        first, last, dims = call.attribute("starts"), call.attribute("ends"), call.attribute("axes") or None
    else:
        first, last = call.ints(starts), call.ints(ends)
        dims = None if axes is None else call.ints(axes)
    dims = list(range(len(first))) if dims is None else dims
    strides = [1] * len(first) if steps is None else call.ints(steps)
    for begin, end, axis, step in zip(first, last, dims, strides, strict=True):
        x = _range_of(x, begin, end, axis, step)
    return x


def _range_of(tensor: Tensor, begin: int, end: int, axis: int, step: int) -> Tensor:
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
def gather(call: NodeCall, x: Operand, indices: Operand) -> Tensor:
    """Gather slices at indices along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    axis = axis + tensor.ndim if axis < 0 else axis
    if isinstance(indices, Known) and indices.real.ndim == 0:
        return tensor.select(axis, indices.items()[0])
    index, is_table = call.tensor(indices).long(), isinstance(x, Known) and axis == 0 and tensor.ndim == 2
    if is_table and not isinstance(indices, Known) and tensor.is_floating_point():
        return torch.embedding(tensor, index)
    if not isinstance(indices, Known) or any(item < 0 for item in indices.items()):
        index = _from_start(index, tensor.shape[axis])
    rows = tensor.index_select(axis, index.reshape(-1))
    return rows.reshape([*tensor.shape[:axis], *index.shape, *tensor.shape[axis + 1 :]])


@operator("ConstantOfShape")
def constant_of_shape(call: NodeCall, sizes: Operand) -> Tensor:
    """Return a tensor filled with a value."""
    value, dims = call.attribute("value"), call.ints(sizes)
    check_size(dims)
    if value is None:
        return torch.full(dims, 0.0)
    number = value.numpy().reshape(-1)[0].item()  # without torch: a policy would cast a tensor
    return torch.full(dims, number, dtype=call.torch_dtype(value.dtype))


@operator("Range")
def range_(call: NodeCall, start: Operand, limit: Operand, delta: Operand) -> Tensor:
    """Return evenly spaced numbers."""
    first, last, step = (call.number(value) for value in (start, limit, delta))
    check_size([math.ceil(abs(last - first) / (abs(step) or 1))])
    return torch.arange(first, last, step, dtype=call.tensor(start).dtype)


@operator("Trilu")
def trilu(call: NodeCall, x: Tensor, k: Operand = None) -> Tensor:
    """Keep the upper or lower triangle."""
    function = torch.triu if call.attribute("upper", 1) else torch.tril
    return function(x, 0 if k is None else int(call.number(k)))


@operator("Pad")
def pad(
    call: NodeCall, tensor: Tensor, pads: Operand = None, value: Operand = None, axes: Operand = None
) -> Tensor:
    """Pad at the borders."""
    mode = call.attribute("mode", "constant")
    amounts = call.attribute("pads") if call.version < 11 else call.ints(pads)
    dims = call.ints(axes) if axes is not None else list(range(tensor.ndim))
    half, widths = len(amounts) // 2, [0] * (2 * tensor.ndim)
    for i, axis in enumerate(dims):
        last_first = tensor.ndim - 1 - (axis % tensor.ndim)
        widths[2 * last_first], widths[2 * last_first + 1] = amounts[i], amounts[half + i]
    check_size([s + sum(widths[2 * i : 2 * i + 2]) for i, s in enumerate(reversed(tensor.shape))])
    if mode != "constant":
        names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
        while widths[-2:] == [0, 0]:
            widths = widths[:-2]
        return F.pad(tensor, widths, mode=names[mode])
    fill = call.attribute("value", 0.0) if call.version < 11 else 0 if value is None else call.number(value)
    return torch.constant_pad_nd(tensor, widths, fill)
