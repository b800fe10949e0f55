"""Quantization, and products of quantized tensors."""

from __future__ import annotations

from typing import Any

import torch

from ampaudit.source.onnx.ops.activations import named_dtype
from ampaudit.source.onnx.ops.elementwise import cast_tensor
from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand, Unsupported


def _along(call: NodeCall, part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Reshape scales or zero points to broadcast to a tensor: one, one per slice, or one per block."""
    axis, size = call.attribute("axis", 1), call.attribute("block_size", 0)
    if size:
        repeated = part.repeat_interleave(size, axis)
        return repeated.narrow(axis, 0, tensor.shape[axis])
    if part.ndim == 1 and tensor.ndim > 0 and part.numel() > 1:
        return part.reshape([-1 if a == axis % tensor.ndim else 1 for a in range(tensor.ndim)])
    return part.reshape(()) if part.numel() == 1 else part


@operator("QuantizeLinear")
def quantize(call: NodeCall, x: Operand, scale: Operand, zero: Operand = None) -> Any:
    """Divide, round and clamp."""
    tensor, factor = call.tensor(x), call.tensor(scale)
    call.refuse_few_bits(2)
    offset = None if zero is None else call.tensor(zero)
    dtype = offset.dtype if offset is not None else named_dtype(call, "output_dtype", torch.uint8)
    quotient = tensor / _along(call, factor, tensor).to(tensor.dtype)
    if dtype.is_floating_point:
        return cast_tensor(call, quotient, dtype)
    quotient = torch.round(quotient)
    if offset is not None:
        quotient = quotient + _along(call, offset, tensor).to(quotient.dtype)
    limits = torch.iinfo(dtype)
    return torch.clamp(quotient, limits.min, limits.max).to(dtype)


@operator("DequantizeLinear")
def dequantize(call: NodeCall, x: Operand, scale: Operand, zero: Operand = None) -> Any:
    """Subtract the zero point and multiply."""
    tensor, factor = call.tensor(x), call.tensor(scale)
    dtype = named_dtype(call, "output_dtype", factor.dtype)
    wide = tensor.to(factor.dtype)
    if zero is not None:
        wide = wide - _along(call, call.tensor(zero), tensor).to(factor.dtype)
    return (wide * _along(call, factor, tensor)).to(dtype)


@operator("MatMulInteger")
def matmul_integer(
    call: NodeCall, a: Operand, b: Operand, a_zero: Operand = None, b_zero: Operand = None
) -> Any:
    """Multiply matrices of integers."""
    first, second = call.tensor(a).int(), call.tensor(b).int()
    if a_zero is not None:
        zero = call.tensor(a_zero).int()
        first = first - (zero.unsqueeze(-1) if zero.ndim == 1 else zero)
    if b_zero is not None:
        second = second - call.tensor(b_zero).int()
    return torch.matmul(first, second)


@operator("QLinearMatMul")
def quantized_matmul(call: NodeCall, *values: Operand) -> Any:
    """Multiply matrices of quantized numbers, and quantize the result."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = (call.tensor(value) for value in values)
    first, second = a.float() - _rows(a_zero), b.float() - b_zero.float()
    product = torch.matmul(first * _rows(a_scale), second * b_scale.float())
    quotient = torch.round(product / _rows(scale)) + _rows(zero)
    limits = torch.iinfo(zero.dtype)
    return torch.clamp(quotient, limits.min, limits.max).to(zero.dtype)


def _rows(part: torch.Tensor) -> torch.Tensor:
    return part.float().unsqueeze(-1) if part.ndim == 1 and part.numel() > 1 else part.float()


@operator("MatMulNBits", domain="com.microsoft")
def matmul_n_bits(
    call: NodeCall,
    a: Operand,
    b: Operand,
    scales: Operand,
    zeros: Operand = None,
    groups: Operand = None,
    bias: Operand = None,
) -> Any:
    """Multiply by a matrix of numbers with few bits, which is converted first."""
    rows, columns, size = call.attribute("N"), call.attribute("K"), call.attribute("block_size")
    bits = call.attribute("bits", 4)
    if groups is not None or bits not in (2, 4, 8):
        raise Unsupported("its weights are ordered by groups")
    blocks, tensor = -(-columns // size), call.tensor(a)
    factor = call.tensor(scales).reshape(rows, blocks, 1)
    packed = _unpacked(call.tensor(b).reshape(rows, blocks, -1), bits)[..., :size].to(tensor.dtype)
    if zeros is None:
        offset: Any = float(1 << (bits - 1))
    else:
        points = call.tensor(zeros)
        offset = points if points.is_floating_point() else _unpacked(points.reshape(rows, -1), bits)
        offset = offset.reshape(rows, -1)[:, :blocks].unsqueeze(-1).to(tensor.dtype)
    weight = ((packed - offset) * factor).reshape(rows, -1)[:, :columns]
    return torch.nn.functional.linear(tensor, weight, None if bias is None else call.tensor(bias))


def _unpacked(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the numbers in bytes, low bits first."""
    parts = [tensor >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)
