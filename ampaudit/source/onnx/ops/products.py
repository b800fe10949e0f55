"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.activations import attribute_text
from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand, Unsupported


@operator("MatMul")
def matmul(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Multiply matrices."""
    return torch.matmul(call.tensor(a), call.tensor(b))


@operator("Gemm")
def gemm(call: NodeCall, a: Operand, b: Operand, c: Operand = None) -> torch.Tensor:
    """Multiply two matrices, and add a third; a layer's weights are those of torch's linear."""
    if _is_linear(call, c):
        bias = None if c is None else call.tensor(c)
        return F.linear(call.tensor(a), call.tensor(b), bias)
    first = call.tensor(a).T if call.attribute("transA", 0) else call.tensor(a)
    second = call.tensor(b).T if call.attribute("transB", 0) else call.tensor(b)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if c is not None:
        return torch.addmm(call.tensor(c), first, second, beta=beta, alpha=alpha)
    product = torch.mm(first, second)
    return product if alpha == 1 else product * alpha


def _is_linear(call: NodeCall, c: Operand) -> bool:
    plain = call.attribute("alpha", 1.0) == call.attribute("beta", 1.0) == 1
    straight = not call.attribute("transA", 0) and call.attribute("transB", 0)
    return bool(plain and straight) and (c is None or call.tensor(c).ndim == 1)


@operator("Einsum")
def einsum(call: NodeCall, *values: Operand) -> torch.Tensor:
    """Sum products over indices."""
    return torch.einsum(str(call.attribute("equation")), *(call.tensor(value) for value in values))


@operator("Conv")
def conv(call: NodeCall, x: Operand, w: Operand, b: Operand = None) -> torch.Tensor:
    """Convolve."""
    tensor, weight = call.tensor(x), call.tensor(w)
    rank = tensor.ndim - 2
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    pads = pads_of(call, list(tensor.shape[2:]), list(weight.shape[2:]), strides, dilations)
    before, after = pads[:rank], pads[rank:]
    if before != after:
        tensor = torch.constant_pad_nd(
            tensor, [p for pair in zip(before[::-1], after[::-1], strict=True) for p in pair]
        )
        before = [0] * rank
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    bias = None if b is None else call.tensor(b)
    return function(tensor, weight, bias, strides, before, dilations, call.attribute("group", 1))


def pads_of(
    call: NodeCall, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Return the widths before and after each axis."""
    how = str(call.attribute("auto_pad", "NOTSET"))
    if how in ("NOTSET", "VALID"):
        pads = call.attribute("pads") if how == "NOTSET" else None
        return list(pads) if pads is not None else [0] * (2 * len(sizes))
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        less = total // 2
        first = less if how == "SAME_UPPER" else total - less
        before.append(first)
        after.append(total - first)
    return [*before, *after]


@operator("ConvTranspose")
def conv_transpose(call: NodeCall, x: Operand, w: Operand, b: Operand = None) -> Any:
    """Apply the transpose of a convolution."""
    tensor, weight = call.tensor(x), call.tensor(w)
    rank = tensor.ndim - 2
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    extra = list(call.attribute("output_padding") or [0] * rank)
    output_shape, how = call.attribute("output_shape"), attribute_text(call, "auto_pad", "NOTSET")
    pads = list(call.attribute("pads") or [0] * (2 * rank))
    full = [
        (size - 1) * stride + (width - 1) * dilation + 1
        for size, stride, width, dilation in zip(
            tensor.shape[2:], strides, weight.shape[2:], dilations, strict=True
        )
    ]
    if output_shape is None and how.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(tensor.shape[2:], strides, strict=True)]
    if output_shape is not None:
        totals = [f + e - size for f, e, size in zip(full, extra, list(output_shape)[-rank:], strict=True)]
        extra = [e + max(0, -total) for e, total in zip(extra, totals, strict=True)]
        totals = [max(0, total) for total in totals]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = [*less, *more] if how == "SAME_UPPER" else [*more, *less]
    before, after = pads[:rank], pads[rank:]
    bias = None if b is None else call.tensor(b)
    functions: Any = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    limits = [max(stride, dilation) for stride, dilation in zip(strides, dilations, strict=True)]
    fits = all(e < limit for e, limit in zip(extra, limits, strict=True))
    ends = [e - a for e, a in zip(extra, after, strict=True)]
    if before == after and fits:
        return functions[rank - 1](
            tensor, weight, bias, strides, before, extra, call.attribute("group", 1), dilations
        )
    result = functions[rank - 1](
        tensor, weight, None, strides, [0] * rank, [0] * rank, call.attribute("group", 1), dilations
    )
    pairs = list(zip(before, ends, strict=True))[::-1]
    result = torch.constant_pad_nd(result, [w for first, last in pairs for w in (-first, last)])
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(call: NodeCall, a: Operand, b: Operand) -> Any:
    """Multiply matrices that may be transposed, and a number."""
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise Unsupported("its batches are transposed")
    first = call.tensor(a).mT if call.attribute("transA", 0) else call.tensor(a)
    second = call.tensor(b).mT if call.attribute("transB", 0) else call.tensor(b)
    alpha = call.attribute("alpha", 1.0)
    product = torch.matmul(first, second)
    return product if alpha == 1 else product * alpha
