"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional as F

from ampaudit.source.onnx.values import FLOATS, Known, NodeCall, Operand, check_size, operator

WITH_ALPHA: dict[str, tuple[Callable[..., Tensor], float]] = {
    "Celu": (F.celu, 1.0), "Elu": (F.elu, 1.0), "LeakyRelu": (F.leaky_relu, 0.01),
}  # fmt: skip
_SELU = (1.67326319217681884765625, 1.05070102214813232421875)
# functions without attributes
PLAIN: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "BitwiseNot": torch.bitwise_not, "HardSwish": F.hardswish, "Mish": F.mish, "Softplus": F.softplus,
    "Det": torch.det, "MatMul": torch.matmul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "NonZero": lambda x: torch.nonzero(x).T,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul,
    "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
    "LessOrEqual": torch.le,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
_SWAPPED = {
    "Greater": "Less", "GreaterOrEqual": "LessOrEqual", "Less": "Greater", "LessOrEqual": "GreaterOrEqual",
}  # fmt: skip


@operator(*PLAIN)
def plain(call: NodeCall, *values: Tensor) -> Tensor:
    """Apply a function that has no attributes."""
    return PLAIN[call.node.op_type](*values)


@operator(*_BINARY)
def binary(call: NodeCall, a: Operand, b: Operand) -> Tensor:
    """Apply a function of two tensors that are broadcast."""
    function = _BINARY[call.node.op_type]
    first, second = call.operand(a, b), call.operand(b, a)
    if isinstance(first, Tensor):
        return function(first, second)
    if call.node.op_type == "Sub":
        return torch.rsub(second, first)
    return _BINARY[_SWAPPED.get(call.node.op_type, call.node.op_type)](second, first)


@operator("Div")
def div(call: NodeCall, a: Operand, b: Operand) -> Tensor:
    """Divide; integers are truncated."""
    dividend, divisor = call.operand(a, b), call.operand(b, a)
    if not isinstance(dividend, Tensor):
        dividend = call.tensor(a)
    if dividend.dtype not in FLOATS:
        return torch.div(dividend, divisor, rounding_mode="trunc")
    return torch.div(dividend, divisor)


@operator("Pow")
def power(call: NodeCall, base: Tensor, b: Operand) -> Tensor:
    """Raise to a power; the result has the type of the base."""
    exponent: Any = call.tensor(b)
    if isinstance(b, Known) and b.constant and b.real.numel() == 1 and b.real.ndim <= base.ndim:
        exponent = call.number(b)
    result = torch.pow(base, exponent)
    # a policy decides the dtype of floats
    return result if base.dtype in FLOATS else result.to(base.dtype)


@operator("Mod")
def mod(call: NodeCall, a: Tensor, b: Operand) -> Tensor:
    """Compute the remainder, with the sign of the divisor; with ``fmod``, that of the dividend."""
    function = torch.fmod if call.attribute("fmod", 0) else torch.remainder
    return function(a, call.operand(b, a))


@operator("Max", "Min", "Sum", "Mean")
def combine(call: NodeCall, *values: Tensor) -> Tensor:
    """Return the largest, the smallest, the sum or the mean of several tensors."""
    result = reduce({"Max": torch.maximum, "Min": torch.minimum}.get(call.node.op_type, torch.add), values)
    return result / len(values) if call.node.op_type == "Mean" else result


@operator("Where")
def where(call: NodeCall, selector: Tensor, a: Operand, b: Operand) -> Tensor:
    """Select from two tensors."""
    for number, other, mask in ((a, b, lambda: selector), (b, a, lambda: ~selector)):
        if call.real or isinstance(other, Known) or not isinstance(number, Known):
            continue
        tensor = call.tensor(other)
        fill = call.operand(number, other)
        if (
            not isinstance(fill, Tensor)
            and torch.broadcast_shapes(selector.shape, tensor.shape) == tensor.shape
        ):
            return torch.masked_fill(tensor, mask(), fill)
    return torch.where(selector, call.tensor(a), call.tensor(b))


@operator("Cast")
def cast(call: NodeCall, x: Tensor) -> Tensor:
    """Convert to another type."""
    return cast_tensor(call, x, call.torch_dtype(ir.DataType(call.attribute("to"))))


def cast_tensor(call: NodeCall, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype: to integers by truncation, and to float8 with saturation unless disabled."""
    if dtype.is_floating_point and dtype.itemsize == 1 and call.attribute("saturate", 1):
        limit = torch.finfo(dtype).max
        return tensor.clamp(-limit, limit).to(dtype)
    if tensor.dtype in FLOATS and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        tensor = tensor.trunc()
    return tensor.to(dtype)


@operator("CastLike")
def cast_like(call: NodeCall, x: Tensor, like: Tensor) -> Tensor:
    """Convert to the type of another tensor."""
    call.reject_sub_byte_type(1)
    return cast_tensor(call, x, like.dtype)


@operator("Identity")
def identity(call: NodeCall, x: Operand) -> Any:
    """Return the input."""
    return x if isinstance(x, list) or x is None else call.tensor(x)


@operator("Dropout")
def dropout(call: NodeCall, x: Tensor, ratio: Operand = None, training: Operand = None) -> Any:
    """Return the input and a mask; in training mode, drop elements at random."""
    share = call.attribute("ratio", 0.5) if ratio is None else call.number(ratio)
    if training is not None and call.number(training) and share:
        return torch.native_dropout(x, float(share), True)
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Clip")
def clip(call: NodeCall, tensor: Tensor, low: Operand = None, high: Operand = None) -> Tensor:
    """Clamp to a range."""
    if call.version < 11:
        return torch.clamp(tensor, call.attribute("min"), call.attribute("max"))
    ends = []
    for end in (low, high):
        number = isinstance(end, Known) and end.constant and not call.real
        ends.append(None if end is None else call.number(end) if number else call.tensor(end))
    if ends == [None, None]:
        return tensor
    if not any(isinstance(end, Tensor) for end in ends):
        return torch.clamp(tensor, ends[0], ends[1])
    for end, function in zip(ends, (torch.maximum, torch.minimum), strict=True):
        tensor = tensor if end is None else function(tensor, torch.as_tensor(end, dtype=tensor.dtype))
    return tensor


@operator("Gelu")
@operator("Gelu", "FastGelu", "BiasGelu", domain="com.microsoft")
def gelu(call: NodeCall, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply GELU, after adding the bias if there is one."""
    usual = "tanh" if call.node.op_type == "FastGelu" else "none"
    return F.gelu(x if bias is None else x + bias, approximate=call.attribute("approximate", usual))


@operator("Swish")
@operator("QuickGelu", domain="com.microsoft")
def swish(call: NodeCall, x: Tensor) -> Tensor:
    """Compute ``x * sigmoid(alpha * x)``."""
    alpha = call.attribute("alpha", 1.0 if call.node.op_type == "Swish" else 1.702)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@operator(*WITH_ALPHA)
def with_alpha(call: NodeCall, x: Tensor) -> Tensor:
    """Apply an activation with the parameter alpha."""
    function, alpha = WITH_ALPHA[call.node.op_type]
    return function(x, call.attribute("alpha", alpha))


@operator("Selu")
def selu(call: NodeCall, x: Tensor) -> Tensor:
    """Apply the scaled exponential linear unit."""
    alpha, gamma = call.attribute("alpha", _SELU[0]), call.attribute("gamma", _SELU[1])
    if math.isclose(alpha, _SELU[0], rel_tol=1e-4) and math.isclose(gamma, _SELU[1], rel_tol=1e-4):
        return torch.selu(x)
    result: Tensor = torch.ops.aten.elu.default(x, alpha, gamma)
    return result


@operator("PRelu")
def prelu(call: NodeCall, x: Tensor, slopes: Tensor) -> Tensor:
    """Apply PReLU, the rectifier with learned slopes for negative values."""
    per_channel = x.ndim > 1 and list(slopes.shape) == [x.shape[1], *[1] * (x.ndim - 2)]
    if slopes.numel() == 1 or per_channel:
        return F.prelu(x, slopes.reshape(-1))
    return torch.where(x < 0, slopes * x, x)


@operator("ThresholdedRelu")
def thresholded_relu(call: NodeCall, x: Tensor) -> Tensor:
    """Set values up to a threshold to zero."""
    return F.threshold(x, call.attribute("alpha", 1.0), 0.0)


@operator("Shrink")
def shrink(call: NodeCall, tensor: Tensor) -> Tensor:
    """Move values towards zero, and set those near it to zero."""
    width, bias = call.attribute("lambd", 0.5), call.attribute("bias", 0.0)
    if bias == 0 and tensor.is_floating_point():
        return F.hardshrink(tensor, width)
    if bias == width and tensor.is_floating_point():
        return F.softshrink(tensor, width)
    negative = torch.where(tensor < -width, tensor + bias, torch.zeros_like(tensor))
    return torch.where(tensor > width, tensor - bias, negative).to(tensor.dtype)


@operator("HardSigmoid")
def hard_sigmoid(call: NodeCall, x: Tensor) -> Tensor:
    """Apply the piecewise linear sigmoid."""
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-5) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


@operator("Hardmax")
def hardmax(call: NodeCall, tensor: Tensor) -> Tensor:
    """Set the first maximum to one, and the other elements to zero."""
    axis = call.attribute("axis", -1 if call.version >= 13 else 1) % tensor.ndim
    shape = tensor.shape
    if call.version < 13:
        tensor, axis = tensor.reshape(shape[:axis].numel(), -1), 1
    places = tensor.argmax(axis, keepdim=True)
    return torch.zeros_like(tensor).scatter(axis, places, 1.0).reshape(shape)


@operator("IsInf")
def is_inf(call: NodeCall, x: Tensor) -> Tensor:
    """Test for infinities of one sign or both."""
    above, below = call.attribute("detect_positive", 1), call.attribute("detect_negative", 1)
    if above and below:
        return torch.isinf(x)
    if above or below:
        return torch.isposinf(x) if above else torch.isneginf(x)
    return torch.zeros_like(x, dtype=torch.bool)


@operator("BitShift")
def bit_shift(call: NodeCall, x: Tensor, amount: Tensor) -> Tensor:
    """Shift bits, as int64 where torch has no kernel for the type."""
    to_left = call.attribute("direction") == "LEFT"
    function = torch.bitwise_left_shift if to_left else torch.bitwise_right_shift
    return function(x.long(), amount.long()).to(x.dtype)


@operator("BitCast")
def bit_cast(call: NodeCall, x: Tensor) -> Tensor:
    """Reinterpret the bits as another type."""
    return x.view(dtype_attribute(call, "to", torch.float32))


@operator("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def random(call: NodeCall, like: Tensor | None = None) -> Tensor:
    """Sample from a normal or uniform distribution."""
    shape = call.attribute("shape") if like is None else like.shape
    check_size(shape)
    dtype = dtype_attribute(call, "dtype", torch.float32 if like is None else like.dtype)
    if call.node.op_type.startswith("RandomNormal"):
        sample = torch.randn(shape, dtype=dtype)
        start, width = call.attribute("mean", 0.0), call.attribute("scale", 1.0)
    else:
        sample = torch.rand(shape, dtype=dtype)
        start = call.attribute("low", 0.0)
        width = call.attribute("high", 1.0) - start
    return sample if (start, width) == (0, 1) else sample * width + start


@operator("Bernoulli")
def bernoulli(call: NodeCall, x: Tensor) -> Tensor:
    """Sample zeros and ones."""
    return torch.bernoulli(x).to(dtype_attribute(call, "dtype", x.dtype))


@operator("Multinomial")
def multinomial(call: NodeCall, x: Tensor) -> Tensor:
    """Sample classes from logarithms of probabilities."""
    sample = torch.multinomial(torch.softmax(x, -1), call.attribute("sample_size", 1), True)
    return sample.to(dtype_attribute(call, "dtype", torch.int32))


def dtype_attribute(call: NodeCall, name: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype that an attribute names."""
    number: Any = call.attribute(name)
    return default if number is None else call.torch_dtype(ir.DataType(number))
