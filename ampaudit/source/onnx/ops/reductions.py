"""Reductions, softmax and normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.ops.shapes import axes_of
from ampaudit.source.onnx.values import NodeCall, Value

__all__: list[str] = []


def _axes(call: NodeCall, tensor: torch.Tensor, since: int) -> list[int] | None:
    """Return the axes to reduce; ``None`` if there is nothing to do."""
    axes = axes_of(call, since=since)
    if not axes:
        return None if call.attribute("noop_with_empty_axes", 0) else list(range(tensor.ndim))
    return axes


@operator("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1")
@operator("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
def reduce(call: NodeCall, x: Value, axes: Value = None) -> torch.Tensor:
    """Reduce over axes."""
    tensor, name, keep = call.tensor(x), call.node.op_type, bool(call.attribute("keepdims", 1))
    chosen = _axes(call, tensor, 13 if name == "ReduceSum" else 18)
    if chosen is None:
        return tensor
    if name == "ReduceMean":
        return (
            torch.mean(tensor, chosen, keep)
            if tensor.is_floating_point()
            else tensor.double().mean(chosen, keep).to(tensor.dtype)
        )
    if name == "ReduceSum":
        return torch.sum(tensor, chosen, keep, dtype=tensor.dtype)
    if name in ("ReduceMax", "ReduceMin"):
        return (torch.amax if name == "ReduceMax" else torch.amin)(tensor, chosen, keep)
    if name == "ReduceProd":
        for axis in sorted(a % tensor.ndim for a in chosen)[::-1]:
            tensor = torch.prod(tensor, axis, keep, dtype=tensor.dtype)
        return tensor
    if name == "ReduceSumSquare":
        return torch.sum(tensor * tensor, chosen, keep, dtype=tensor.dtype)
    if name == "ReduceL1":
        return torch.sum(tensor.abs(), chosen, keep, dtype=tensor.dtype)
    if name == "ReduceL2":
        return torch.sqrt(torch.sum(tensor * tensor, chosen, keep, dtype=tensor.dtype))
    if name == "ReduceLogSum":
        return torch.log(torch.sum(tensor, chosen, keep))
    return torch.logsumexp(tensor, chosen, keep)


@operator("Softmax", "LogSoftmax")
def softmax(call: NodeCall, x: Value) -> torch.Tensor:
    """Apply softmax along an axis; before version 13, over all axes from that one on."""
    tensor = call.tensor(x)
    function = torch.softmax if call.node.op_type == "Softmax" else torch.log_softmax
    if call.version >= 13:
        return function(tensor, call.attribute("axis", -1))
    axis = call.attribute("axis", 1) % max(tensor.ndim, 1)
    if axis == tensor.ndim - 1:
        return function(tensor, axis)
    flat = tensor.reshape(*tensor.shape[:axis], -1)
    return function(flat, -1).reshape(tensor.shape)


@operator("LayerNormalization")
def layer_norm(call: NodeCall, x: Value, scale: Value, bias: Value = None) -> Any:
    """Normalize over the last axes; statistics are computed in float32."""
    tensor = call.tensor(x)
    axis = call.attribute("axis", -1) % tensor.ndim
    shape = list(tensor.shape[axis:])
    weight = call.tensor(scale).expand(shape)
    shift = None if bias is None else call.tensor(bias).expand(shape)
    eps = call.attribute("epsilon", 1e-5)
    made = F.layer_norm(tensor, shape, weight, shift, eps)
    if not any(output.uses() or output.is_graph_output() for output in call.node.outputs[1:]):
        return made
    axes = list(range(axis, tensor.ndim))
    wide = tensor.float()
    mean = wide.mean(axes, keepdim=True)
    deviation = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + eps)
    return made, mean, deviation


@operator("BatchNormalization")
def batch_norm(
    call: NodeCall, x: Value, scale: Value, bias: Value, mean: Value, variance: Value
) -> torch.Tensor:
    """Normalize with stored statistics."""
    if call.attribute("training_mode", 0):
        raise call.fault("it is in training mode")
    weight, shift, center, spread = (call.tensor(value) for value in (scale, bias, mean, variance))
    eps = call.attribute("epsilon", 1e-5)
    return F.batch_norm(call.tensor(x), center, spread, weight, shift, training=False, eps=eps)


@operator("ArgMax", "ArgMin")
def arg(call: NodeCall, x: Value) -> torch.Tensor:
    """Find the place of an extreme along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    function = torch.argmax if call.node.op_type == "ArgMax" else torch.argmin
    keep = bool(call.attribute("keepdims", 1))
    if not call.attribute("select_last_index", 0):
        return function(tensor, axis, keep)
    found: torch.Tensor = tensor.shape[axis] - 1 - function(tensor.flip(axis), axis, keep)
    return found


@operator("TopK")
def topk(call: NodeCall, x: Value, k: Value = None) -> Any:
    """Return the largest or smallest elements."""
    count = call.attribute("k") if call.version < 10 else call.ints(k)[0]
    return torch.topk(
        call.tensor(x),
        count,
        call.attribute("axis", -1),
        bool(call.attribute("largest", 1)),
        bool(call.attribute("sorted", 1)),
    )


@operator("CumSum")
def cumsum(call: NodeCall, x: Value, axis: Value) -> torch.Tensor:
    """Add up along an axis."""
    tensor, dim = call.tensor(x), int(call.number(axis))
    back = call.attribute("reverse", 0)
    tensor = tensor.flip(dim) if back else tensor
    made = torch.cumsum(tensor, dim, dtype=tensor.dtype)
    if call.attribute("exclusive", 0):
        made = torch.cat(
            [torch.zeros_like(made.narrow(dim, 0, 1)), made.narrow(dim, 0, made.shape[dim] - 1)], dim
        )
    return made.flip(dim) if back else made
