"""Dequantizes the codes and scales of quantized formats to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["awq", "bitsandbytes_4bit", "bitsandbytes_8bit", "gptq", "scaled", "unpack"]

_BLOCK = 128  # of fine-grained fp8, unless a layer names its own
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of a word's values, as AutoAWQ interleaves them


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack integers of any width along the first axis from 32-bit words, the lowest bits first.

    Args:
        packed: Words of int32; a value may span two of them.
        bits: Width of a value.
        count: Number of values.
    """
    start = torch.arange(count, device=packed.device) * bits
    word, shift = start // 32, (start % 32).view(-1, *[1] * (packed.dim() - 1))
    words = packed.long() & 0xFFFFFFFF
    above = words[(word + 1).clamp(max=len(words) - 1)] << (32 - shift)
    return (words[word] >> shift | above) & ((1 << bits) - 1)


def scaled(
    values: Tensor, scale: Tensor, block: tuple[int, ...] | None = None, zero: Tensor | None = None
) -> Tensor:
    """Multiply values by their scales, given per tensor, row, column group or block.

    Args:
        values: Codes of any dtype.
        scale: Scales; without ``block``, their shape tells which values each applies to.
        block: Size along the last axes of the blocks with one scale each; the last block may be partial.
        zero: Zero points to subtract first, in the shape of the scales.

    Raises:
        ValueError: The shapes do not fit.
    """
    wide = values.float()
    if zero is not None:
        wide = wide - _spread(zero, values.shape, block)
    return wide * _spread(scale, values.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, ...] | None) -> Tensor:
    """Broadcast scales to the elements that they apply to."""
    wide = scale.float()
    if block is None and wide.numel() == 1:
        return wide.reshape(())
    if block is None and wide.dim() == 1 and len(wide) == shape[0]:
        wide = wide.view(-1, *[1] * (len(shape) - 1))
    widths = [*[1] * (len(shape) - len(block)), *block] if block is not None else _widths(wide.shape, shape)
    counts = [-(-size // width) for size, width in zip(shape, widths, strict=False)]
    if list(wide.shape) != counts or len(widths) != len(shape):
        raise ValueError(f"scales of shape {tuple(scale.shape)} for values of shape {tuple(shape)}")
    for axis, (size, width) in enumerate(zip(shape, widths, strict=True)):
        if counts[axis] not in (1, size):
            wide = wide.repeat_interleave(width, axis).narrow(axis, 0, size)
    return wide


def _widths(counts: torch.Size, shape: torch.Size) -> list[int]:
    """Return the size along each axis of the blocks with one scale each."""
    return [
        _BLOCK if count not in (1, size) and count == -(-size // _BLOCK) else max(1, size // max(1, count))
        for count, size in zip(counts, shape, strict=False)
    ]


def bitsandbytes_4bit(data: Tensor, state: Any) -> Tensor:
    """Look up each nibble, the high one first, and multiply by its block's largest magnitude.

    The magnitudes may themselves be quantized to 8 bits about their mean (``nested``). A run on a CPU with
    bfloat16 instructions leaves the codes in blocks of 32 rows.
    """
    if getattr(state, "packing_format_for_cpu", False):
        rows, half = data.shape
        packed = data.reshape(-1, 32)
        codes = torch.cat([packed & 15, packed >> 4], 1).reshape(-1, half, 32, 2)
        codes = codes.transpose(1, 2).reshape(rows, 2 * half).long()
        peaks = state.absmax.float().T.repeat_interleave(state.blocksize, 1)
        weight: Tensor = state.code.float()[codes] * peaks[:, : codes.shape[1]]
        return weight
    raw = data.contiguous().view(torch.uint8).reshape(-1)
    codes = torch.stack([raw >> 4, raw & 15], 1).reshape(-1).long()
    peaks = state.absmax.reshape(-1)
    if state.nested:
        inner = state.state2
        peaks = _blocks(inner.code[peaks.long()], inner.absmax, inner.blocksize) + state.offset
    count = state.shape.numel()
    return _blocks(state.code.float()[codes[:count]], peaks.float(), state.blocksize).reshape(state.shape)


def _blocks(values: Tensor, peaks: Tensor, size: int) -> Tensor:
    return values * peaks.repeat_interleave(size)[: len(values)]


def bitsandbytes_8bit(codes: Tensor, peaks: Tensor) -> Tensor:
    """Dequantize rows of int8 in which 127 stands for the row's largest magnitude."""
    return codes.float() * (peaks.float() / 127).reshape(-1, 1)


def gptq(layer: Any, *, less_one: bool) -> Tensor:
    """Return the weight of a GPTQ layer: (code - zero) * scale, with zero and scale per group of inputs.

    Args:
        layer: Layer with ``qweight``, ``qzeros``, ``scales``, ``bits``; ``g_idx`` if inputs are reordered.
        less_one: Whether zeros are stored minus one; they wrap around, except for 3 bits.
    """
    bits, (groups, outputs) = layer.bits, layer.scales.shape
    inputs = layer.qweight.shape[0] * 32 // bits
    codes = unpack(layer.qweight, bits, inputs)
    zeros = unpack(layer.qzeros.T, bits, outputs).T
    if less_one:
        zeros = zeros + 1 if bits == 3 else (zeros + 1) & ((1 << bits) - 1)
    group = getattr(layer, "g_idx", None)
    if group is None or group.numel() != inputs:
        group = torch.arange(inputs, device=codes.device) // -(-inputs // groups)
    group = group.long()
    weight: Tensor = (codes - zeros[group]).float() * layer.scales.float()[group]
    return weight.T.contiguous()


def awq(layer: Any) -> Tensor:
    """Return the weight of a 4-bit AWQ layer: (code - zero) * scale, per group of inputs.

    Rows are inputs in AWQ's order (GEMM) or outputs in plain order (GEMV).
    """
    codes, zeros = (unpack(t.T, 4, 8 * t.shape[1]).T for t in (layer.qweight, layer.qzeros))
    scales, size = layer.scales.float(), layer.group_size
    if layer.qweight.shape[0] == layer.in_features and layer.scales.shape[1] == layer.out_features:
        size = size if size > 0 else len(codes)
        order = torch.arange(codes.shape[1], device=codes.device).view(-1, 8)[:, list(_AWQ_ORDER)].reshape(-1)
        codes, zeros, scales = codes[:, order].T, zeros[:, order].T, scales.T
    group = torch.arange(codes.shape[1], device=codes.device) // size
    weight: Tensor = (codes - zeros[:, group]).float() * scales[:, group]
    return weight.contiguous()
