"""Normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand


def _spread(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Expand a tensor to a shape; one of that shape adds no op beside the norm."""
    return tensor if list(tensor.shape) == shape else tensor.expand(shape)


@operator("LayerNormalization")
def layer_norm(call: NodeCall, x: Operand, scale: Operand, bias: Operand = None) -> Any:
    """Normalize over the last axes; statistics are computed in float32."""
    tensor = call.tensor(x)
    axis = call.attribute("axis", -1) % tensor.ndim
    return (_layer_norm(call, tensor, scale, bias, axis), *_statistics(call, tensor, axis))


@operator("RMSNormalization")
@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain="com.microsoft")
def rms_norm(call: NodeCall, x: Operand, scale: Operand) -> Any:
    """Divide by the root of the mean square over the last axes."""
    tensor = call.tensor(x)
    axis = call.attribute("axis", -1) % tensor.ndim
    result = _rms_norm(call, tensor, scale, axis)
    return (result, _inverse_root(call, tensor)) if call.is_read(1) else result


@operator("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_norm(
    call: NodeCall, x: Operand, skip: Operand, scale: Operand, bias: Operand = None, before: Operand = None
) -> Any:
    """Add, then normalize over the last axis."""
    total = _skip_sum(call, x, skip, before)
    axis = total.ndim - 1
    return (_layer_norm(call, total, scale, bias, axis), *_statistics(call, total, axis), total)


@operator("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_rms_norm(call: NodeCall, x: Operand, skip: Operand, scale: Operand, before: Operand = None) -> Any:
    """Add, then divide by the root of the mean square over the last axis."""
    total = _skip_sum(call, x, skip, before)
    result = _rms_norm(call, total, scale, total.ndim - 1)
    return result, None, _inverse_root(call, total) if call.is_read(2) else None, total


def _skip_sum(call: NodeCall, x: Operand, skip: Operand, bias: Operand) -> torch.Tensor:
    total = call.tensor(x) + call.tensor(skip)
    return total if bias is None else total + call.tensor(bias)


def _layer_norm(
    call: NodeCall, tensor: torch.Tensor, scale: Operand, bias: Operand, axis: int
) -> torch.Tensor:
    shape = list(tensor.shape[axis:])
    weight = _spread(call.tensor(scale), shape)
    shift = None if bias is None else _spread(call.tensor(bias), shape)
    return F.layer_norm(tensor, shape, weight, shift, _epsilon(call))


def _rms_norm(call: NodeCall, tensor: torch.Tensor, scale: Operand, axis: int) -> torch.Tensor:
    shape = list(tensor.shape[axis:])
    return F.rms_norm(tensor, shape, _spread(call.tensor(scale), shape), _epsilon(call))


def _epsilon(call: NodeCall) -> Any:
    return call.attribute("epsilon", 1e-12 if call.node.op_type.startswith("Skip") else 1e-5)


def _statistics(
    call: NodeCall, tensor: torch.Tensor, axis: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the mean and the inverse standard deviation if they are used."""
    if not (call.is_read(1) or call.is_read(2)):
        return None, None
    axes, wide = list(range(axis, tensor.ndim)), tensor.float()
    mean = wide.mean(axes, keepdim=True)
    variance = (wide - mean).square().mean(axes, keepdim=True)
    return mean, torch.rsqrt(variance + _epsilon(call))


def _inverse_root(call: NodeCall, tensor: torch.Tensor) -> torch.Tensor:
    mean = tensor.float().square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + _epsilon(call))


@operator("GroupNormalization", "InstanceNormalization")
def group_norm(call: NodeCall, x: Operand, scale: Operand, bias: Operand) -> torch.Tensor:
    """Normalize groups of channels, or each channel; before version 21 each group has one scale."""
    tensor = call.tensor(x)
    groups = call.attribute("num_groups", tensor.shape[1])
    weight, shift = call.tensor(scale), call.tensor(bias)
    if weight.shape[0] != tensor.shape[1]:
        weight, shift = (t.repeat_interleave(tensor.shape[1] // groups) for t in (weight, shift))
    return F.group_norm(tensor, groups, weight, shift, call.attribute("epsilon", 1e-5))


@operator("BatchNormalization")
def batch_norm(
    call: NodeCall, x: Operand, scale: Operand, bias: Operand, mean: Operand, variance: Operand
) -> Any:
    """Normalize with stored statistics, or in training mode with those of the batch."""
    tensor, eps = call.tensor(x), call.attribute("epsilon", 1e-5)
    weight, shift, center, spread = (call.tensor(value) for value in (scale, bias, mean, variance))
    if not call.attribute("training_mode", 0):
        return F.batch_norm(tensor, center, spread, weight, shift, training=False, eps=eps)
    result = F.batch_norm(tensor, None, None, weight, shift, training=True, eps=eps)
    axes, momentum = [axis for axis in range(tensor.ndim) if axis != 1], call.attribute("momentum", 0.9)
    moments = torch.var_mean(tensor, axes, correction=0)
    return (
        result,
        center * momentum + moments[1] * (1 - momentum),
        spread * momentum + moments[0] * (1 - momentum),
    )


@operator("LpNormalization")
def lp_norm(call: NodeCall, x: Operand) -> torch.Tensor:
    """Divide by a norm along an axis; a norm of 0 gives 0."""
    tensor = call.tensor(x)
    norm = torch.linalg.vector_norm(tensor, call.attribute("p", 2), call.attribute("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(tensor), tensor / norm)


@operator("LRN")
def local_response_norm(call: NodeCall, x: Operand) -> torch.Tensor:
    """Divide by a power of the sum of squares of near channels."""
    tensor, size = call.tensor(x), call.attribute("size")
    pads = [0, 0] * (tensor.ndim - 2) + [(size - 1) // 2, size // 2]
    near = torch.constant_pad_nd(tensor * tensor, pads).unfold(1, size, 1).sum(-1)
    scaled = near * (call.attribute("alpha", 1e-4) / size) + call.attribute("bias", 1.0)
    return tensor / torch.pow(scaled, call.attribute("beta", 0.75))
