"""Operators that read and write elements at computed places."""

from __future__ import annotations

import torch

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Value

__all__: list[str] = []


@operator("GatherElements")
def gather_elements(call: NodeCall, x: Value, indices: Value) -> torch.Tensor:
    """Take an element for each index along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    index = call.tensor(indices).long()
    return torch.gather(tensor, axis, torch.where(index < 0, index + tensor.shape[axis], index))


@operator("GatherND")
def gather_nd(call: NodeCall, x: Value, indices: Value) -> torch.Tensor:
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
