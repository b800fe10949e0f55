"""Operators that read and write elements at computed places."""

from __future__ import annotations

from typing import Any

import torch

from ampaudit.source.onnx.ops.activations import attribute_text, named_dtype
from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import Known, NodeCall, Operand, check_size

__all__: list[str] = []

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
    made = tensor.reshape(-1, *rest).scatter_reduce(0, places, new, _REDUCTIONS[how])
    return made.reshape(tensor.shape)


@operator("TensorScatter")
def tensor_scatter(call: NodeCall, x: Operand, update: Operand, starts: Operand = None) -> torch.Tensor:
    """Write a part along an axis, from a place for each element of the batch."""
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
        places = torch.tensor([i for i, chosen in enumerate(condition.items()) if chosen], dtype=torch.int64)
    else:
        places = torch.nonzero(call.tensor(condition)).reshape(-1)
    return tensor.index_select(axis, places)


@operator("Unique")
def unique(call: NodeCall, x: Operand) -> Any:
    """Find the different elements or slices, where each is first, and how often it is there."""
    tensor, axis = call.tensor(x), call.attribute("axis")
    if axis is None:
        tensor, axis = tensor.reshape(-1), 0
    made, places, counts = torch.unique(tensor, return_inverse=True, return_counts=True, dim=axis)
    places = places.reshape(-1)
    steps = torch.arange(places.shape[0])
    first = torch.full_like(counts, places.shape[0]).scatter_reduce(0, places, steps, "amin")
    if call.attribute("sorted", 1):
        return made, first, places, counts
    order = torch.argsort(first)
    return made.index_select(axis, order), first[order], torch.argsort(order)[places], counts[order]


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
