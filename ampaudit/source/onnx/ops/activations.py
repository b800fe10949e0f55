"""Activations, random values, and elementwise operators that are rare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand, check_size

__all__ = ["attribute_text", "named_dtype"]

_WITH_ALPHA: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "Celu": (F.celu, 1.0), "Elu": (F.elu, 1.0), "LeakyRelu": (F.leaky_relu, 0.01),
}  # fmt: skip
_SELU = (1.67326319217681884765625, 1.05070102214813232421875)


@operator("Gelu")
@operator("Gelu", domain="com.microsoft")
def gelu(call: NodeCall, x: Operand) -> torch.Tensor:
    """Apply the Gaussian error linear unit."""
    return F.gelu(call.tensor(x), approximate=attribute_text(call, "approximate", "none"))


@operator("FastGelu", "BiasGelu", domain="com.microsoft")
def bias_gelu(call: NodeCall, x: Operand, bias: Operand = None) -> torch.Tensor:
    """Add, then apply the Gaussian error linear unit."""
    tensor = call.tensor(x) if bias is None else call.tensor(x) + call.tensor(bias)
    return F.gelu(tensor, approximate="tanh" if call.node.op_type == "FastGelu" else "none")


@operator("Swish")
@operator("QuickGelu", domain="com.microsoft")
def swish(call: NodeCall, x: Operand) -> torch.Tensor:
    """Multiply by the sigmoid of a multiple."""
    tensor = call.tensor(x)
    alpha = call.attribute("alpha", 1.0 if call.node.op_type == "Swish" else 1.702)
    return F.silu(tensor) if alpha == 1 else tensor * torch.sigmoid(tensor * alpha)


@operator(*_WITH_ALPHA)
def with_alpha(call: NodeCall, x: Operand) -> torch.Tensor:
    """Apply an activation with the parameter alpha."""
    function, alpha = _WITH_ALPHA[call.node.op_type]
    return function(call.tensor(x), call.attribute("alpha", alpha))


@operator("Selu")
def selu(call: NodeCall, x: Operand) -> torch.Tensor:
    """Apply the scaled exponential linear unit."""
    alpha, gamma = call.attribute("alpha", _SELU[0]), call.attribute("gamma", _SELU[1])
    if math.isclose(alpha, _SELU[0], rel_tol=1e-4) and math.isclose(gamma, _SELU[1], rel_tol=1e-4):
        return torch.selu(call.tensor(x))
    result: torch.Tensor = torch.ops.aten.elu.default(call.tensor(x), alpha, gamma)
    return result


@operator("PRelu")
def prelu(call: NodeCall, x: Operand, slope: Operand) -> torch.Tensor:
    """Apply the rectifier with learned slopes."""
    tensor, slopes = call.tensor(x), call.tensor(slope)
    per_channel = tensor.ndim > 1 and list(slopes.shape) == [tensor.shape[1], *[1] * (tensor.ndim - 2)]
    if slopes.numel() == 1 or per_channel:
        return F.prelu(tensor, slopes.reshape(-1))
    return torch.where(tensor < 0, slopes * tensor, tensor)


@operator("ThresholdedRelu")
def thresholded_relu(call: NodeCall, x: Operand) -> torch.Tensor:
    """Keep what is above a threshold."""
    return F.threshold(call.tensor(x), call.attribute("alpha", 1.0), 0.0)


@operator("Shrink")
def shrink(call: NodeCall, x: Operand) -> torch.Tensor:
    """Move values towards zero."""
    tensor, width, bias = call.tensor(x), call.attribute("lambd", 0.5), call.attribute("bias", 0.0)
    if bias == 0 and tensor.is_floating_point():
        return F.hardshrink(tensor, width)
    if bias == width and tensor.is_floating_point():
        return F.softshrink(tensor, width)
    negative = torch.where(tensor < -width, tensor + bias, torch.zeros_like(tensor))
    return torch.where(tensor > width, tensor - bias, negative).to(tensor.dtype)


@operator("HardSigmoid")
def hard_sigmoid(call: NodeCall, x: Operand) -> torch.Tensor:
    """Apply the piecewise linear sigmoid."""
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-5) and beta == 0.5:
        return F.hardsigmoid(call.tensor(x))
    return torch.clamp(call.tensor(x) * alpha + beta, 0, 1)


@operator("Hardmax")
def hardmax(call: NodeCall, x: Operand) -> torch.Tensor:
    """Set the first largest element to one, and the others to zero."""
    tensor = call.tensor(x)
    axis = call.attribute("axis", -1 if call.version >= 13 else 1) % tensor.ndim
    shape = tensor.shape
    if call.version < 13:
        tensor, axis = tensor.reshape(shape[:axis].numel(), -1), 1
    places = tensor.argmax(axis, keepdim=True)
    return torch.zeros_like(tensor).scatter(axis, places, 1.0).reshape(shape)


@operator("IsInf")
def is_inf(call: NodeCall, x: Operand) -> torch.Tensor:
    """Find infinities of one sign or both."""
    tensor = call.tensor(x)
    above, below = call.attribute("detect_positive", 1), call.attribute("detect_negative", 1)
    if above and below:
        return torch.isinf(tensor)
    if above or below:
        return torch.isposinf(tensor) if above else torch.isneginf(tensor)
    return torch.zeros_like(tensor, dtype=torch.bool)


@operator("BitShift")
def bit_shift(call: NodeCall, x: Operand, amount: Operand) -> torch.Tensor:
    """Shift bits, as int64 where torch has no kernel for the type."""
    to_left = attribute_text(call, "direction", "") == "LEFT"
    function = torch.bitwise_left_shift if to_left else torch.bitwise_right_shift
    tensor = call.tensor(x)
    return function(tensor.long(), call.tensor(amount).long()).to(tensor.dtype)


@operator("BitCast")
def bit_cast(call: NodeCall, x: Operand) -> torch.Tensor:
    """Read the bits as another type."""
    dtype = named_dtype(call, "to", torch.float32)
    return call.tensor(x).view(dtype)


@operator("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def random(call: NodeCall, like: Operand = None) -> torch.Tensor:
    """Draw from a normal or uniform distribution."""
    if like is None:
        shape, default = list(call.attribute("shape")), torch.float32
        check_size(shape)
    else:
        shape, default = list(call.tensor(like).shape), call.tensor(like).dtype
    dtype = named_dtype(call, "dtype", default)
    if call.node.op_type.startswith("RandomNormal"):
        sample = torch.randn(shape, dtype=dtype)
        start, width = call.attribute("mean", 0.0), call.attribute("scale", 1.0)
    else:
        sample = torch.rand(shape, dtype=dtype)
        start = call.attribute("low", 0.0)
        width = call.attribute("high", 1.0) - start
    return sample if (start, width) == (0, 1) else sample * width + start


@operator("Bernoulli")
def bernoulli(call: NodeCall, x: Operand) -> torch.Tensor:
    """Draw zeros and ones."""
    tensor = call.tensor(x)
    return torch.bernoulli(tensor).to(named_dtype(call, "dtype", tensor.dtype))


@operator("Multinomial")
def multinomial(call: NodeCall, x: Operand) -> torch.Tensor:
    """Draw classes from logarithms of probabilities."""
    sample = torch.multinomial(torch.softmax(call.tensor(x), -1), call.attribute("sample_size", 1), True)
    return sample.to(named_dtype(call, "dtype", torch.int32))


def named_dtype(call: NodeCall, name: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype that an attribute names."""
    import onnx_ir as ir

    number: Any = call.attribute(name)
    if number is None:
        return default
    return call.torch_dtype(ir.DataType(number))


def attribute_text(call: NodeCall, name: str, default: str) -> str:
    """Return an attribute that is text."""
    value = call.attribute(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)
