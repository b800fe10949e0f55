"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import FLOATS, Known, NodeCall, Operand

__all__ = ["cast_tensor"]

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "BitwiseNot": torch.bitwise_not, "HardSwish": F.hardswish, "Mish": F.mish, "Softplus": F.softplus,
    "Det": torch.det,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
    "LessOrEqual": torch.le,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
_ALWAYS_TENSORS = {"And", "Or", "Xor"}


@operator(*_UNARY)
def unary(call: NodeCall, x: Operand) -> torch.Tensor:
    """Apply a function of one tensor."""
    return _UNARY[call.node.op_type](call.tensor(x))


@operator(*_BINARY)
def binary(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Apply a function of two tensors that are broadcast."""
    function = _BINARY[call.node.op_type]
    if call.node.op_type in _ALWAYS_TENSORS:
        return function(call.tensor(a), call.tensor(b))
    first, second = call.operand(a, b), call.operand(b, a)
    if isinstance(first, torch.Tensor):
        return function(first, second)
    if call.node.op_type == "Sub":
        return torch.rsub(second, first)
    swapped = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual", "Less": "Greater"}
    swapped["LessOrEqual"] = "GreaterOrEqual"
    return _BINARY[swapped.get(call.node.op_type, call.node.op_type)](second, first)


@operator("Div")
def div(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Divide; integers are truncated."""
    dividend, divisor = call.operand(a, b), call.operand(b, a)
    if not isinstance(dividend, torch.Tensor):
        dividend = call.tensor(a)
    if dividend.dtype not in FLOATS:
        return torch.div(dividend, divisor, rounding_mode="trunc")
    return torch.div(dividend, divisor)


@operator("Pow")
def power(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Raise to a power; the result has the type of the base."""
    base = call.tensor(a)
    exponent: Any = call.tensor(b)
    if isinstance(b, Known) and b.constant and b.real.numel() == 1 and b.real.ndim <= base.ndim:
        exponent = call.number(b)
    result = torch.pow(base, exponent)
    # a policy decides the dtype of floats
    return result if base.dtype in FLOATS else result.to(base.dtype)


@operator("Mod")
def mod(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Compute a remainder, with the sign of the divisor, or of the dividend for fmod."""
    function = torch.fmod if call.attribute("fmod", 0) else torch.remainder
    return function(call.tensor(a), call.operand(b, a))


@operator("Max", "Min")
def extreme(call: NodeCall, *values: Operand) -> torch.Tensor:
    """Return the largest or smallest of several tensors."""
    function = torch.maximum if call.node.op_type == "Max" else torch.minimum
    result = call.tensor(values[0])
    for value in values[1:]:
        result = function(result, call.tensor(value))
    return result


@operator("Sum", "Mean")
def total(call: NodeCall, *values: Operand) -> torch.Tensor:
    """Add several tensors, or average them."""
    result = call.tensor(values[0])
    for value in values[1:]:
        result = result + call.tensor(value)
    return result / len(values) if call.node.op_type == "Mean" else result


@operator("Where")
def where(call: NodeCall, condition: Operand, a: Operand, b: Operand) -> torch.Tensor:
    """Select from two tensors."""
    selector = call.tensor(condition)
    for number, other, mask in ((a, b, lambda: selector), (b, a, lambda: ~selector)):
        if call.real or isinstance(other, Known) or not isinstance(number, Known):
            continue
        tensor = call.tensor(other)
        fill = call.operand(number, other)
        if (
            not isinstance(fill, torch.Tensor)
            and torch.broadcast_shapes(selector.shape, tensor.shape) == tensor.shape
        ):
            return torch.masked_fill(tensor, mask(), fill)
    return torch.where(selector, call.tensor(a), call.tensor(b))


@operator("Cast")
def cast(call: NodeCall, x: Operand) -> torch.Tensor:
    """Convert to another type."""
    import onnx_ir as ir

    dtype = call.torch_dtype(ir.DataType(call.attribute("to")))
    return cast_tensor(call, call.tensor(x), dtype)


def cast_tensor(call: NodeCall, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert; floats are truncated to integers, and saturate in float8 unless told otherwise."""
    if dtype.is_floating_point and dtype.itemsize == 1 and call.attribute("saturate", 1):
        limit = torch.finfo(dtype).max
        return tensor.clamp(-limit, limit).to(dtype)
    if tensor.dtype in FLOATS and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        tensor = tensor.trunc()
    return tensor.to(dtype)


@operator("CastLike")
def cast_like(call: NodeCall, x: Operand, like: Operand) -> torch.Tensor:
    """Convert to the type of another tensor."""
    call.refuse_few_bits(1)
    return cast_tensor(call, call.tensor(x), call.tensor(like).dtype)


@operator("Identity")
def identity(call: NodeCall, x: Operand) -> Any:
    """Return the input."""
    return x if isinstance(x, list) or x is None else call.tensor(x)


@operator("Dropout")
def dropout(call: NodeCall, x: Operand, ratio: Operand = None, training: Operand = None) -> Any:
    """Return the input, or drop elements at random if the graph says that it trains."""
    tensor, share = call.tensor(x), call.attribute("ratio", 0.5) if ratio is None else call.number(ratio)
    if training is not None and call.number(training) and share:
        return torch.native_dropout(tensor, float(share), True)
    return tensor, torch.ones_like(tensor, dtype=torch.bool)


@operator("Clip")
def clip(call: NodeCall, x: Operand, low: Operand = None, high: Operand = None) -> torch.Tensor:
    """Limit to a range."""
    tensor = call.tensor(x)
    if call.version < 11:
        return torch.clamp(tensor, call.attribute("min"), call.attribute("max"))
    ends = []
    for end in (low, high):
        number = isinstance(end, Known) and end.constant and not call.real
        ends.append(None if end is None else call.number(end) if number else call.tensor(end))
    if ends == [None, None]:
        return tensor
    if any(isinstance(end, torch.Tensor) for end in ends):
        for end, function in zip(ends, (torch.maximum, torch.minimum), strict=True):
            tensor = tensor if end is None else function(tensor, torch.as_tensor(end, dtype=tensor.dtype))
        return tensor
    return torch.clamp(tensor, ends[0], ends[1])
