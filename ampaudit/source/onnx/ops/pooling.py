"""Pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.products import pads_of
from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand

__all__: list[str] = []

_AVERAGES = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Where the windows of a pooling node lie.

    Attributes:
        before: padding before each axis.
        after: padding after each axis that the windows need; negative where they leave out the end.
        given_after: padding after each axis that the node states.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    given_after: list[int]
    plain: bool

    def padded(self, tensor: torch.Tensor, fill: float) -> torch.Tensor:
        """Return a tensor with the padding around it."""
        pairs = list(zip(self.before, self.after, strict=True))[::-1]
        if not any(width for pair in pairs for width in pair):
            return tensor
        return torch.constant_pad_nd(tensor, [width for pair in pairs for width in pair], fill)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the windows of a padded tensor, each as one last axis."""
        rank = len(self.kernel)
        for axis, (width, stride, step) in enumerate(
            zip(self.kernel, self.strides, self.dilations, strict=True)
        ):
            tensor = tensor.unfold(2 + axis, (width - 1) * step + 1, stride)[..., ::step]
        return tensor.flatten(-rank)


def _windows(call: NodeCall, tensor: torch.Tensor) -> _Windows:
    sizes, kernel = list(tensor.shape[2:]), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    pads = pads_of(call, sizes, kernel, strides, dilations)
    before, given_after = pads[:rank], pads[rank:]
    up, after = call.attribute("ceil_mode", 0), []
    for size, width, stride, step, first, last in zip(
        sizes, kernel, strides, dilations, before, given_after, strict=True
    ):
        reach = (width - 1) * step + 1
        steps = (size + first + last - reach) / stride
        count = (math.ceil(steps) if up else math.floor(steps)) + 1
        if up and (count - 1) * stride >= size + first:  # a window that begins in the padding
            count -= 1
        after.append((count - 1) * stride + reach - size - first)
    floor_only = not up and before == given_after
    plain = rank <= 3 and floor_only and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    return _Windows(kernel, strides, dilations, before, after, given_after, plain)


@operator("AveragePool")
def average_pool(call: NodeCall, x: Operand) -> Any:
    """Average windows."""
    tensor = call.tensor(x)
    windows, with_pads = _windows(call, tensor), bool(call.attribute("count_include_pad", 0))
    if windows.plain and set(windows.dilations) == {1}:
        function: Any = _AVERAGES[len(windows.kernel) - 1]
        return function(tensor, windows.kernel, windows.strides, windows.before, count_include_pad=with_pads)
    ones = torch.ones([1, 1, *tensor.shape[2:]], dtype=tensor.dtype)
    if with_pads:
        pairs = list(zip(windows.before, windows.given_after, strict=True))[::-1]
        ones = torch.ones(
            [1, 1, *(s + b + a for s, (b, a) in zip(tensor.shape[2:], pairs[::-1], strict=True))],
            dtype=tensor.dtype,
        )
        after = [a - g for a, g in zip(windows.after, windows.given_after, strict=True)]
        ones = torch.constant_pad_nd(ones, [w for a in after[::-1] for w in (0, a)])
    else:
        ones = windows.padded(ones, 0.0)
    counts = windows.of(ones).sum(-1)
    return windows.of(windows.padded(tensor, 0.0)).sum(-1) / counts


@operator("MaxPool")
def max_pool(call: NodeCall, x: Operand) -> Any:
    """Take the largest element of each window."""
    tensor = call.tensor(x)
    windows, rank = _windows(call, tensor), tensor.ndim - 2
    padded, before = tensor, windows.before
    if not windows.plain:
        low = -math.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        padded, before = windows.padded(tensor, low), [0] * rank
    function: Any = _MAXIMA[rank - 1]
    indices = call.wanted(1)
    made = function(
        padded, windows.kernel, windows.strides, before, windows.dilations, return_indices=indices
    )
    if not indices:
        return made
    return made[0], _whole_places(call, made[1], tensor, padded, windows)


def _whole_places(
    call: NodeCall, places: torch.Tensor, tensor: torch.Tensor, padded: torch.Tensor, windows: _Windows
) -> torch.Tensor:
    """Return places in a channel of the padded tensor as places in the whole tensor."""
    before = [0] * len(windows.kernel) if padded is tensor else windows.before
    parts: list[torch.Tensor] = []
    sizes, rest = list(tensor.shape[2:]), places
    for size, first in list(zip(padded.shape[2:], before, strict=True))[::-1]:
        parts.insert(0, rest % size - first)
        rest = rest // size
    column_major = call.attribute("storage_order", 0)
    made, stride = torch.zeros_like(places), 1
    for part, size in list(zip(parts, sizes, strict=True))[:: 1 if column_major else -1]:
        made, stride = made + part * stride, stride * size
    channels = torch.arange(tensor.shape[0] * tensor.shape[1]).reshape(*tensor.shape[:2], *[1] * len(sizes))
    return made + channels * stride


@operator("LpPool")
def lp_pool(call: NodeCall, x: Operand) -> Any:
    """Take the norm of each window."""
    tensor = call.tensor(x)
    windows = _windows(call, tensor)
    return torch.linalg.vector_norm(windows.of(windows.padded(tensor, 0.0)), call.attribute("p", 2), -1)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(call: NodeCall, x: Operand) -> Any:
    """Reduce all axes after the channels."""
    tensor, name = call.tensor(x), call.node.op_type
    axes = list(range(2, tensor.ndim))
    if name == "GlobalAveragePool":
        return torch.mean(tensor, axes, keepdim=True)
    if name == "GlobalMaxPool":
        return torch.amax(tensor, axes, keepdim=True)
    return torch.linalg.vector_norm(tensor, call.attribute("p", 2), axes, keepdim=True)


@operator("MaxUnpool")
def max_unpool(call: NodeCall, x: Operand, indices: Operand, shape: Operand = None) -> torch.Tensor:
    """Put elements back to the places that they were taken from."""
    tensor, places = call.tensor(x), call.tensor(indices)
    kernel = list(call.attribute("kernel_shape"))
    strides = list(call.attribute("strides") or [1] * len(kernel))
    pads = list(call.attribute("pads") or [0] * (2 * len(kernel)))
    natural = [
        (size - 1) * stride + width - sum(pads[axis :: len(kernel)])
        for axis, (size, stride, width) in enumerate(zip(tensor.shape[2:], strides, kernel, strict=True))
    ]
    made = torch.zeros([*tensor.shape[:2], *natural], dtype=tensor.dtype)
    sizes = made.shape if shape is None else torch.Size(call.ints(shape))
    # the places are those in the tensor before the pooling, which has the natural size
    spread = made.flatten().scatter(0, places.flatten(), tensor.flatten()).reshape(made.shape)
    ends = [w for new, old in zip(sizes[::-1], made.shape[::-1], strict=True) for w in (0, new - old)]
    return torch.constant_pad_nd(spread, ends) if any(ends) else spread
