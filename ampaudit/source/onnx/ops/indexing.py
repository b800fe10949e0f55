"""Indexing and reshaping operators."""

from __future__ import annotations

import math
from typing import Any

import torch

from ampaudit.source.onnx.ops.elementwise import attribute_text, named_dtype
from ampaudit.source.onnx.values import Known, NodeCall, Operand, check_size, operator

__all__ = ["axes_of"]


_REDUCTIONS = {"mul": "prod", "min": "amin", "max": "amax"}


@operator("GatherElements")
def gather_elements(call: NodeCall, x: Operand, indices: Operand) -> torch.Tensor:
    """Take an element for each index along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    index = call.tensor(indices).long()
    return torch.gather(tensor, axis, torch.where(index < 0, index + tensor.shape[axis], index))


@operator("GatherND")
def gather_nd(call: NodeCall, x: Operand, indices: Operand) -> torch.Tensor:
    """Take slices at tuples of indices."""
    tensor, index = call.tensor(x), call.tensor(indices).long()
    batch, width = call.attribute("batch_dims", 0), index.shape[-1]
    sizes = torch.tensor(tensor.shape[batch : batch + width])
    index = torch.where(index < 0, index + sizes, index)
    grids = [
        torch.arange(tensor.shape[axis]).reshape([-1 if i == axis else 1 for i in range(index.ndim - 1)])
        for axis in range(batch)
    ]
    return tensor[(*grids, *index.unbind(-1))]


@operator("ScatterElements", "Scatter")
def scatter_elements(call: NodeCall, x: Operand, indices: Operand, updates: Operand) -> torch.Tensor:
    """Write an element for each index along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    index, new = call.tensor(indices).long(), call.tensor(updates)
    index = torch.where(index < 0, index + tensor.shape[axis], index)
    how = attribute_text(call, "reduction", "none")
    if how == "none":
        return torch.scatter(tensor, axis, index, new)
    if how == "add":
        return torch.scatter_add(tensor, axis, index, new)
    return torch.scatter_reduce(tensor, axis, index, new, _REDUCTIONS[how])


@operator("ScatterND")
def scatter_nd(call: NodeCall, x: Operand, indices: Operand, updates: Operand) -> torch.Tensor:
    """Write slices at tuples of indices."""
    tensor, index, new = call.tensor(x), call.tensor(indices).long(), call.tensor(updates)
    width = index.shape[-1]
    sizes = torch.tensor(tensor.shape[:width])
    index = torch.where(index < 0, index + sizes, index)
    how = attribute_text(call, "reduction", "none")
    if how in ("none", "add"):
        return torch.index_put(tensor, index.unbind(-1), new, accumulate=how == "add")
    strides = [tensor.shape[i + 1 : width].numel() for i in range(width)]
    flat = (index * torch.tensor(strides)).sum(-1).reshape(-1)
    rest = tensor.shape[width:]
    new = new.reshape(-1, *rest)
    places = flat.reshape(-1, *[1] * len(rest)).expand_as(new)
    result = tensor.reshape(-1, *rest).scatter_reduce(0, places, new, _REDUCTIONS[how])
    return result.reshape(tensor.shape)


@operator("TensorScatter")
def tensor_scatter(call: NodeCall, x: Operand, update: Operand, starts: Operand = None) -> torch.Tensor:
    """Write a part along an axis, from a start for each element of the batch."""
    tensor, new = call.tensor(x), call.tensor(update)
    axis = call.attribute("axis", -2) % tensor.ndim
    steps = torch.arange(new.shape[axis]).reshape([-1 if a == axis else 1 for a in range(tensor.ndim)])
    if starts is not None:
        steps = steps + call.tensor(starts).reshape([-1, *[1] * (tensor.ndim - 1)])
    if attribute_text(call, "mode", "linear") == "circular":
        steps = steps % tensor.shape[axis]
    return torch.scatter(tensor, axis, steps.expand_as(new), new)


@operator("NonZero")
def non_zero(call: NodeCall, x: Operand) -> torch.Tensor:
    """Find the elements that are not zero."""
    return torch.nonzero(call.tensor(x)).T


@operator("Compress")
def compress(call: NodeCall, x: Operand, condition: Operand) -> torch.Tensor:
    """Take the slices for which a condition holds."""
    tensor, axis = call.tensor(x), call.attribute("axis")
    if axis is None:
        tensor, axis = tensor.reshape(-1), 0
    if isinstance(condition, Known) and not call.real:
        places = torch.tensor([i for i, keep in enumerate(condition.items()) if keep], dtype=torch.int64)
    else:
        places = torch.nonzero(call.tensor(condition)).reshape(-1)
    return tensor.index_select(axis, places)


@operator("Unique")
def unique(call: NodeCall, x: Operand) -> Any:
    """Return the distinct elements or slices, their first positions, inverse indices and counts."""
    tensor, axis = call.tensor(x), call.attribute("axis")
    if axis is None:
        tensor, axis = tensor.reshape(-1), 0
    values, places, counts = torch.unique(tensor, return_inverse=True, return_counts=True, dim=axis)
    places = places.reshape(-1)
    steps = torch.arange(places.shape[0])
    first = torch.full_like(counts, places.shape[0]).scatter_reduce(0, places, steps, "amin")
    if call.attribute("sorted", 1):
        return values, first, places, counts
    order = torch.argsort(first)
    return values.index_select(axis, order), first[order], torch.argsort(order)[places], counts[order]


@operator("OneHot")
def one_hot(call: NodeCall, indices: Operand, depth: Operand, values: Operand) -> torch.Tensor:
    """Set one element for each index."""
    index, count, pair = call.tensor(indices), int(call.floats(depth)[0]), call.tensor(values)
    axis = call.attribute("axis", -1) % (index.ndim + 1)
    check_size([*index.shape, count])
    steps = torch.arange(count).reshape([-1 if a == axis else 1 for a in range(index.ndim + 1)])
    index = torch.where(index < 0, index + count, index).unsqueeze(axis)
    return torch.where(index == steps, pair[1], pair[0])


@operator("EyeLike")
def eye_like(call: NodeCall, x: Operand) -> Any:
    """Make a matrix with ones on a diagonal."""
    tensor = call.tensor(x)
    rows, columns = (torch.arange(size) for size in tensor.shape)
    ones = rows.unsqueeze(1) + call.attribute("k", 0) == columns
    return ones.to(named_dtype(call, "dtype", tensor.dtype))


def axes_of(call: NodeCall, since: int = 13) -> list[int] | None:
    """Return the axes of a node, an attribute before the version ``since`` and an input from then on."""
    if call.version < since:
        axes = call.attribute("axes")
        return None if axes is None else list(axes)
    value = call.inputs[1] if len(call.inputs) > 1 else None
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
    target = list(call.attribute("shape")) if sizes is None else call.ints(sizes)
    if not call.attribute("allowzero", 0):
        target = [tensor.shape[i] if s == 0 else s for i, s in enumerate(target)]
    return tensor.reshape(target)


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
    tensor, dims = call.tensor(x), axes_of(call)
    return tensor.squeeze() if dims is None else tensor.squeeze(tuple(dims)) if dims else tensor


@operator("Unsqueeze")
def unsqueeze(call: NodeCall, x: Operand, axes: Operand = None) -> torch.Tensor:
    """Add axes of size one."""
    tensor, dims = call.tensor(x), axes_of(call) or []
    rank = tensor.ndim + len(dims)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in dims):
        tensor = tensor.unsqueeze(axis)
    return tensor


@operator("Expand")
def expand(call: NodeCall, x: Operand, sizes: Operand) -> torch.Tensor:
    """Broadcast in both directions."""
    tensor = call.tensor(x)
    target = torch.broadcast_shapes(tensor.shape, tuple(call.ints(sizes)))
    check_size(target)
    return tensor.expand(target)


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
    lengths = call.ints(sizes) if sizes is not None else call.attribute("split")
    if lengths is None:
        count, length = call.attribute("num_outputs") or len(call.node.outputs), tensor.shape[axis]
        part = -(-length // count)
        lengths = [min(part, length - part * i) for i in range(count)]
    return tuple(torch.split(tensor, list(lengths), dim=axis))


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
        dims, strides = list(call.attribute("axes") or range(len(first))), [1] * len(first)
    else:
        first, last = call.ints(starts), call.ints(ends)
        dims = call.ints(axes) if axes is not None else list(range(len(first)))
        strides = call.ints(steps) if steps is not None else [1] * len(first)
    for begin, end, axis, step in zip(first, last, dims, strides, strict=True):
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
    rows = tensor.index_select(axis, index.reshape(-1))
    return rows.reshape([*tensor.shape[:axis], *index.shape, *tensor.shape[axis + 1 :]])


@operator("ConstantOfShape")
def constant_of_shape(call: NodeCall, sizes: Operand) -> torch.Tensor:
    """Fill a new tensor."""
    value, dims = call.attribute("value"), call.ints(sizes)
    check_size(dims)
    if value is None:
        return torch.full(dims, 0.0)
    number = value.numpy().reshape(-1)[0].item()  # without torch: a policy would cast a tensor
    return torch.full(dims, number, dtype=call.torch_dtype(value.dtype))


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
    amounts = list(call.attribute("pads")) if call.version < 11 else call.ints(pads)
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
        return torch.nn.functional.pad(tensor, widths, mode=names[mode])
    fill = call.attribute("value", 0.0) if call.version < 11 else 0 if value is None else call.number(value)
    return torch.constant_pad_nd(tensor, widths, fill)
