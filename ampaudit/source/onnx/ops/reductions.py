"""Reductions, softmax and normalizations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.indexing import axes_of
from ampaudit.source.onnx.values import NodeCall, Operand, operator


@operator("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1")
@operator("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
def reduce(call: NodeCall, x: Operand, axes: Operand = None) -> torch.Tensor:
    """Reduce over axes."""
    tensor, name, keep = call.tensor(x), call.node.op_type, bool(call.attribute("keepdims", 1))
    dims = axes_of(call, since=13 if name == "ReduceSum" else 18)
    if not dims:
        if call.attribute("noop_with_empty_axes", 0):
            return tensor
        dims = list(range(tensor.ndim))
    if name == "ReduceMean":
        return (
            torch.mean(tensor, dims, keep)
            if tensor.is_floating_point()
            else tensor.double().mean(dims, keep).to(tensor.dtype)
        )
    if name in ("ReduceMax", "ReduceMin"):
        if not tensor.numel():  # the identity of the operation
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
    dtype = _sum_dtype(tensor)
    if name in ("ReduceSumSquare", "ReduceL2"):
        tensor = tensor * tensor
    elif name == "ReduceL1":
        tensor = tensor.abs()
    total = torch.sum(tensor, dims, keep, dtype=dtype)
    return torch.sqrt(total) if name == "ReduceL2" else total


def _empty_extreme(tensor: torch.Tensor, axes: list[int], keep: bool, largest: bool) -> torch.Tensor:
    sizes = torch.empty(tensor.shape, device="meta").sum(axes, keep).shape
    if tensor.dtype == torch.bool:
        return torch.full(sizes, not largest)
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    end: Any = info(tensor.dtype).min if largest else info(tensor.dtype).max
    if tensor.is_floating_point():
        end = -math.inf if largest else math.inf
    return torch.full(sizes, end, dtype=_sum_dtype(tensor))


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a sum: that of integers; ``None`` for floats, for which the policy decides."""
    return None if tensor.is_floating_point() else tensor.dtype


@operator("Softmax", "LogSoftmax")
def softmax(call: NodeCall, x: Operand) -> torch.Tensor:
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


@operator("ArgMax", "ArgMin")
def arg(call: NodeCall, x: Operand) -> torch.Tensor:
    """Return the index of the extreme along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    function = torch.argmax if call.node.op_type == "ArgMax" else torch.argmin
    keep = bool(call.attribute("keepdims", 1))
    if not call.attribute("select_last_index", 0):
        return function(tensor, axis, keep)
    last_index: torch.Tensor = tensor.shape[axis] - 1 - function(tensor.flip(axis), axis, keep)
    return last_index


@operator("TopK")
def topk(call: NodeCall, x: Operand, k: Operand = None) -> Any:
    """Return the largest or smallest elements."""
    count = call.attribute("k") if call.version < 10 else call.ints(k)[0]
    return torch.topk(
        call.tensor(x),
        count,
        call.attribute("axis", -1),
        bool(call.attribute("largest", 1)),
        bool(call.attribute("sorted", 1)),
    )


@operator("CumSum", "CumProd")
def cumulated(call: NodeCall, x: Operand, axis: Operand) -> torch.Tensor:
    """Add up or multiply along an axis."""
    tensor, dim, adds = call.tensor(x), int(call.number(axis)), call.node.op_type == "CumSum"
    back = call.attribute("reverse", 0)
    tensor = tensor.flip(dim) if back else tensor
    result = (torch.cumsum if adds else torch.cumprod)(tensor, dim, dtype=_sum_dtype(tensor))
    if call.attribute("exclusive", 0):
        first = (torch.zeros_like if adds else torch.ones_like)(result.narrow(dim, 0, 1))
        result = torch.cat([first, result.narrow(dim, 0, result.shape[dim] - 1)], dim)
    return result.flip(dim) if back else result


@operator("DFT")
def dft(call: NodeCall, x: Operand, length: Operand = None, axis: Operand = None) -> Any:
    """Transform a real or complex signal."""
    tensor, one_sided = call.tensor(x), bool(call.attribute("onesided", 0))
    dim = call.attribute("axis", 1) if call.version < 20 else -2 if axis is None else int(call.number(axis))
    dim = dim % tensor.ndim
    size = None if length is None else int(call.number(length))
    real = tensor.shape[-1] == 1
    signal = tensor.squeeze(-1) if real else torch.view_as_complex(tensor.contiguous())
    if call.attribute("inverse", 0):
        if one_sided:
            return torch.fft.irfft(signal, size, dim).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(signal, size, dim))
    return torch.view_as_real((torch.fft.rfft if one_sided else torch.fft.fft)(signal, size, dim))


@operator("STFT")
def stft(
    call: NodeCall, x: Operand, step: Operand, window: Operand = None, length: Operand = None
) -> torch.Tensor:
    """Transform windows of a signal."""
    tensor = call.tensor(x)
    size = int(call.number(length)) if length is not None else call.tensor(window).shape[0]
    real = tensor.shape[-1] == 1
    signal = tensor.squeeze(-1) if real else torch.view_as_complex(tensor.contiguous())
    frames = signal.unfold(1, size, int(call.number(step)))
    frames = frames if window is None else frames * call.tensor(window)
    one_sided = real and call.attribute("onesided", 1)
    return torch.view_as_real((torch.fft.rfft if one_sided else torch.fft.fft)(frames))


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
    groups = tensor.shape[1] if call.node.op_type == "InstanceNormalization" else call.attribute("num_groups")
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
