"""Reductions, softmax and normalizations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampaudit.source.onnx.ops.indexing import axes_of
from ampaudit.source.onnx.values import NodeCall, Operand, operator


@operator("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1")
@operator("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
def reduce(call: NodeCall, tensor: Tensor, axes: Operand = None) -> Tensor:
    """Reduce over axes."""
    name, keep = call.node.op_type, bool(call.attribute("keepdims", 1))
    dims = axes_of(call, since=13 if name == "ReduceSum" else 18)
    if not dims:
        if call.attribute("noop_with_empty_axes", 0):
            return tensor
        dims = list(range(tensor.ndim))
    if name == "ReduceMean":
        if tensor.is_floating_point():
            return torch.mean(tensor, dims, keep)
        return tensor.double().mean(dims, keep).to(tensor.dtype)
    if name in ("ReduceMax", "ReduceMin"):
        if not tensor.numel():
            return _empty_extreme(tensor, dims, keep, name == "ReduceMax")
        return (torch.amax if name == "ReduceMax" else torch.amin)(tensor, dims, keep)
    if name == "ReduceProd":
        for axis in sorted(a % tensor.ndim for a in dims)[::-1]:
            tensor = torch.prod(tensor, axis, keep, dtype=_sum_dtype(tensor))
        return tensor
    if name == "ReduceLogSumExp":
        return torch.logsumexp(tensor, dims, keep)
    if name == "ReduceLogSum":
        return torch.log(torch.sum(tensor, dims, keep))
    if name in ("ReduceSumSquare", "ReduceL2"):
        tensor = tensor * tensor
    elif name == "ReduceL1":
        tensor = tensor.abs()
    total = torch.sum(tensor, dims, keep, dtype=_sum_dtype(tensor))
    return torch.sqrt(total) if name == "ReduceL2" else total


def _empty_extreme(tensor: Tensor, axes: list[int], keep: bool, largest: bool) -> Tensor:
    """Return the maximum or minimum of no elements: the identity of the operation."""
    sizes = torch.empty(tensor.shape, device="meta").sum(axes, keep).shape
    if tensor.is_floating_point():
        return tensor.new_full(sizes, -math.inf if largest else math.inf)
    if tensor.dtype == torch.bool:
        return tensor.new_full(sizes, not largest)
    info = torch.iinfo(tensor.dtype)
    return tensor.new_full(sizes, info.min if largest else info.max)


def _sum_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of a sum: that of integers; ``None`` for floats, for which the policy decides."""
    return None if tensor.is_floating_point() else tensor.dtype


@operator("Softmax", "LogSoftmax")
def softmax(call: NodeCall, x: Tensor) -> Tensor:
    """Apply softmax along an axis; before version 13, over all axes from that one on."""
    function = torch.softmax if call.node.op_type == "Softmax" else torch.log_softmax
    if call.version >= 13:
        return function(x, call.attribute("axis", -1))
    axis = call.attribute("axis", 1) % max(x.ndim, 1)
    if axis == x.ndim - 1:
        return function(x, axis)
    return function(x.reshape(*x.shape[:axis], -1), -1).reshape(x.shape)


@operator("ArgMax", "ArgMin")
def arg(call: NodeCall, x: Tensor) -> Tensor:
    """Return the index of the maximum or minimum along an axis."""
    function = torch.argmax if call.node.op_type == "ArgMax" else torch.argmin
    axis, keep = call.attribute("axis", 0), bool(call.attribute("keepdims", 1))
    if not call.attribute("select_last_index", 0):
        return function(x, axis, keep)
    last_index: Tensor = x.shape[axis] - 1 - function(x.flip(axis), axis, keep)
    return last_index


@operator("TopK")
def topk(call: NodeCall, x: Tensor, k: Operand = None) -> Any:
    """Return the largest or smallest elements."""
    count = call.attribute("k") if call.version < 10 else call.ints(k)[0]
    largest, in_order = bool(call.attribute("largest", 1)), bool(call.attribute("sorted", 1))
    return torch.topk(x, count, call.attribute("axis", -1), largest, in_order)


@operator("CumSum", "CumProd")
def cumulate(call: NodeCall, x: Tensor, axis: Operand) -> Tensor:
    """Compute the cumulative sum or product along an axis."""
    dim, adds, back = int(call.number(axis)), call.node.op_type == "CumSum", call.attribute("reverse", 0)
    x = x.flip(dim) if back else x
    result = (torch.cumsum if adds else torch.cumprod)(x, dim, dtype=_sum_dtype(x))
    if call.attribute("exclusive", 0):
        first = (torch.zeros_like if adds else torch.ones_like)(result.narrow(dim, 0, 1))
        result = torch.cat([first, result.narrow(dim, 0, result.shape[dim] - 1)], dim)
    return result.flip(dim) if back else result


@operator("DFT")
def dft(call: NodeCall, x: Tensor, length: Operand = None, axis: Operand = None) -> Any:
    """Compute the Fourier transform of a real or complex signal."""
    one_sided, signal = bool(call.attribute("onesided", 0)), _signal(x)
    dim = call.attribute("axis", 1) if call.version < 20 else -2 if axis is None else int(call.number(axis))
    dim = dim % x.ndim
    size = None if length is None else int(call.number(length))
    if call.attribute("inverse", 0):
        if one_sided:
            return torch.fft.irfft(signal, size, dim).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(signal, size, dim))
    return torch.view_as_real((torch.fft.rfft if one_sided else torch.fft.fft)(signal, size, dim))


def _signal(parts: Tensor) -> Tensor:
    """Return the signal whose parts the last axis holds: the real one, or the real and imaginary ones."""
    return parts.squeeze(-1) if parts.shape[-1] == 1 else torch.view_as_complex(parts.contiguous())


@operator("STFT")
def stft(call: NodeCall, x: Tensor, step: Operand, window: Operand = None, length: Operand = None) -> Tensor:
    """Compute the Fourier transforms of the windows of a signal."""
    size = int(call.number(length)) if length is not None else call.tensor(window).shape[0]
    frames = _signal(x).unfold(1, size, int(call.number(step)))
    frames = frames if window is None else frames * call.tensor(window)
    one_sided = x.shape[-1] == 1 and call.attribute("onesided", 1)
    return torch.view_as_real((torch.fft.rfft if one_sided else torch.fft.fft)(frames))


@operator("LayerNormalization")
def layer_norm(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """Normalize over the last axes; if the statistics are read, they are computed in float32."""
    axis, eps = call.attribute("axis", -1) % x.ndim, _epsilon(call)
    shape = list(x.shape[axis:])
    weight, shift = _spread(scale, shape), None if bias is None else _spread(bias, shape)
    result = F.layer_norm(x, shape, weight, shift, eps)
    if not (call.is_read(1) or call.is_read(2)):
        return result, None, None
    axes, wide = list(range(axis, x.ndim)), x.float()
    mean = wide.mean(axes, keepdim=True)
    variance = (wide - mean).square().mean(axes, keepdim=True)
    return result, mean, torch.rsqrt(variance + eps)


@operator("RMSNormalization")
@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain="com.microsoft")
def rms_norm(call: NodeCall, x: Tensor, scale: Tensor) -> Any:
    """Divide by the root of the mean square over the last axes."""
    result = _rms_norm(call, x, scale)
    return (result, _inverse_root(call, x)) if call.is_read(1) else result


@operator("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_norm(
    call: NodeCall,
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    before: Tensor | None = None,
) -> Any:
    """Add, then normalize over the last axis."""
    total = x + skip if before is None else x + skip + before
    return (*layer_norm(call, total, scale, bias), total)


@operator("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_rms_norm(
    call: NodeCall, x: Tensor, skip: Tensor, scale: Tensor, before: Tensor | None = None
) -> Any:
    """Add, then divide by the root of the mean square over the last axis."""
    total = x + skip if before is None else x + skip + before
    result = _rms_norm(call, total, scale)
    return result, None, _inverse_root(call, total) if call.is_read(2) else None, total


def _rms_norm(call: NodeCall, tensor: Tensor, scale: Tensor) -> Tensor:
    shape = list(tensor.shape[call.attribute("axis", -1) % tensor.ndim :])
    return F.rms_norm(tensor, shape, _spread(scale, shape), _epsilon(call))


def _spread(tensor: Tensor, shape: list[int]) -> Tensor:
    """Expand a tensor to a shape, without an op if it has that shape."""
    return tensor if list(tensor.shape) == shape else tensor.expand(shape)


def _epsilon(call: NodeCall) -> Any:
    return call.attribute("epsilon", 1e-12 if call.node.op_type.startswith("Skip") else 1e-5)


def _inverse_root(call: NodeCall, tensor: Tensor) -> Tensor:
    axes = list(range(call.attribute("axis", -1) % tensor.ndim, tensor.ndim))
    mean = tensor.float().square().mean(axes, keepdim=True)
    return torch.rsqrt(mean + _epsilon(call))


@operator("GroupNormalization", "InstanceNormalization")
def group_norm(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize groups of channels, or each channel; before version 21 each group has one scale."""
    groups = x.shape[1] if call.node.op_type == "InstanceNormalization" else call.attribute("num_groups")
    if scale.shape[0] != x.shape[1]:
        scale, bias = (t.repeat_interleave(x.shape[1] // groups) for t in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.attribute("epsilon", 1e-5))


@operator("BatchNormalization")
def batch_norm(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    """Normalize with stored statistics, or in training mode with those of the batch."""
    eps = call.attribute("epsilon", 1e-5)
    if not call.attribute("training_mode", 0):
        return F.batch_norm(x, mean, variance, scale, bias, training=False, eps=eps)
    result = F.batch_norm(x, None, None, scale, bias, training=True, eps=eps)
    axes, momentum = [axis for axis in range(x.ndim) if axis != 1], call.attribute("momentum", 0.9)
    spread, center = torch.var_mean(x, axes, correction=0)
    rest = 1 - momentum
    return result, mean * momentum + center * rest, variance * momentum + spread * rest


@operator("LpNormalization")
def lp_norm(call: NodeCall, x: Tensor) -> Tensor:
    """Divide by a norm along an axis; a norm of 0 gives 0."""
    norm = torch.linalg.vector_norm(x, call.attribute("p", 2), call.attribute("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("LRN")
def local_response_norm(call: NodeCall, x: Tensor) -> Tensor:
    """Divide by a power of the sum of squares of neighboring channels."""
    size = call.attribute("size")
    pads = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    near = torch.constant_pad_nd(x * x, pads).unfold(1, size, 1).sum(-1)
    scaled = near * (call.attribute("alpha", 1e-4) / size) + call.attribute("bias", 1.0)
    return x / torch.pow(scaled, call.attribute("beta", 0.75))
