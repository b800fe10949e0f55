"""Pooling, resizing and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ampaudit.source.onnx.ops.products import last_axis_first, pads_of
from ampaudit.source.onnx.values import NodeCall, Operand, Unsupported, check_size, operator

Array = np.ndarray[Any, Any]
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
_AVERAGES = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a pooling node, and the padding before and after each axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]  # that the windows need; negative where they omit the end
    declared_after: list[int]  # by the node
    plain: bool  # torch's op pools in the same way

    def padded(self, tensor: Tensor, fill: float) -> Tensor:
        """Return a tensor with the padding around it."""
        widths = last_axis_first(self.before, self.after)
        return torch.constant_pad_nd(tensor, widths, fill) if any(widths) else tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the windows of a padded tensor, each as one last axis."""
        axes = zip(self.kernel, self.strides, self.dilations, strict=True)
        for axis, (width, stride, step) in enumerate(axes, 2):
            tensor = tensor.unfold(axis, (width - 1) * step + 1, stride)[..., ::step]
        return tensor.flatten(-len(self.kernel))


def _windows(call: NodeCall, tensor: Tensor) -> _Windows:
    sizes, kernel = list(tensor.shape[2:]), call.attribute("kernel_shape")
    rank = len(kernel)
    strides, dilations = call.attribute("strides") or [1] * rank, call.attribute("dilations") or [1] * rank
    pads = pads_of(call, sizes, kernel, strides, dilations)
    before, declared_after = pads[:rank], pads[rank:]
    up, after = call.attribute("ceil_mode", 0), []
    for size, width, stride, step, first, last in zip(
        sizes, kernel, strides, dilations, before, declared_after, strict=True
    ):
        reach = (width - 1) * step + 1
        steps = (size + first + last - reach) / stride
        count = (math.ceil(steps) if up else math.floor(steps)) + 1
        if up and (count - 1) * stride >= size + first:  # a window that begins in the padding
            count -= 1
        after.append((count - 1) * stride + reach - size - first)
    floor_only = not up and before == declared_after
    plain = rank <= 3 and floor_only and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    return _Windows(kernel, strides, dilations, before, after, declared_after, plain)


@operator("AveragePool")
def average_pool(call: NodeCall, tensor: Tensor) -> Any:
    """Average windows."""
    windows, with_pads = _windows(call, tensor), bool(call.attribute("count_include_pad", 0))
    if windows.plain and set(windows.dilations) == {1}:
        function: Any = _AVERAGES[len(windows.kernel) - 1]
        return function(tensor, windows.kernel, windows.strides, windows.before, count_include_pad=with_pads)
    if with_pads:
        padded = zip(tensor.shape[2:], windows.before, windows.declared_after, strict=True)
        ones = torch.ones([1, 1, *map(sum, padded)], dtype=tensor.dtype)
        after = [a - g for a, g in zip(windows.after, windows.declared_after, strict=True)]
        ones = torch.constant_pad_nd(ones, last_axis_first([0] * len(after), after))
    else:
        ones = windows.padded(torch.ones([1, 1, *tensor.shape[2:]], dtype=tensor.dtype), 0.0)
    counts = windows.of(ones).sum(-1)
    return windows.of(windows.padded(tensor, 0.0)).sum(-1) / counts


@operator("MaxPool")
def max_pool(call: NodeCall, tensor: Tensor) -> Any:
    """Take the largest element of each window."""
    windows, rank = _windows(call, tensor), tensor.ndim - 2
    padded, before = tensor, windows.before
    if not windows.plain:
        low = -math.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        padded, before = windows.padded(tensor, low), [0] * rank
    function: Any = _MAXIMA[rank - 1]
    indices = call.is_read(1)
    result = function(
        padded, windows.kernel, windows.strides, before, windows.dilations, return_indices=indices
    )
    if not indices:
        return result
    return result[0], _flat_indices(call, result[1], tensor, padded, windows)


def _flat_indices(
    call: NodeCall, places: Tensor, tensor: Tensor, padded: Tensor, windows: _Windows
) -> Tensor:
    """Convert indices within a channel of the padded tensor to indices in the whole tensor."""
    before = [0] * len(windows.kernel) if padded is tensor else windows.before
    parts: list[Tensor] = []
    sizes, rest = list(tensor.shape[2:]), places
    for size, first in list(zip(padded.shape[2:], before, strict=True))[::-1]:
        parts.insert(0, rest % size - first)
        rest = rest // size
    column_major = call.attribute("storage_order", 0)
    flat, stride = torch.zeros_like(places), 1
    for part, size in list(zip(parts, sizes, strict=True))[:: 1 if column_major else -1]:
        flat, stride = flat + part * stride, stride * size
    channels = torch.arange(tensor.shape[0] * tensor.shape[1]).reshape(*tensor.shape[:2], *[1] * len(sizes))
    return flat + channels * stride


@operator("LpPool")
def lp_pool(call: NodeCall, x: Tensor) -> Any:
    """Take the norm of each window."""
    windows = _windows(call, x)
    return torch.linalg.vector_norm(windows.of(windows.padded(x, 0.0)), call.attribute("p", 2), -1)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(call: NodeCall, x: Tensor) -> Any:
    """Reduce all axes after the channels."""
    axes = list(range(2, x.ndim))
    if call.node.op_type == "GlobalAveragePool":
        return torch.mean(x, axes, keepdim=True)
    if call.node.op_type == "GlobalMaxPool":
        return torch.amax(x, axes, keepdim=True)
    return torch.linalg.vector_norm(x, call.attribute("p", 2), axes, keepdim=True)


@operator("MaxUnpool")
def max_unpool(call: NodeCall, tensor: Tensor, places: Tensor, shape: Operand = None) -> Tensor:
    """Put elements back at the positions from which they were pooled."""
    kernel = call.attribute("kernel_shape")
    strides = call.attribute("strides") or [1] * len(kernel)
    pads = call.attribute("pads") or [0] * (2 * len(kernel))
    natural = [
        (size - 1) * stride + width - sum(pads[axis :: len(kernel)])
        for axis, (size, stride, width) in enumerate(zip(tensor.shape[2:], strides, kernel, strict=True))
    ]
    base = torch.zeros([*tensor.shape[:2], *natural], dtype=tensor.dtype)
    sizes = base.shape if shape is None else torch.Size(call.ints(shape))
    # the places are those in the tensor before the pooling, which has the natural size
    spread = base.flatten().scatter(0, places.flatten(), tensor.flatten()).reshape(base.shape)
    ends = [new - old for new, old in zip(sizes, base.shape, strict=True)]
    return torch.constant_pad_nd(spread, last_axis_first([0] * len(ends), ends)) if any(ends) else spread


@operator("Resize", "Upsample")
def resize(call: NodeCall, x: Tensor, *rest: Operand) -> Tensor:
    """Interpolate along axes: with torch's op if its coordinates are the same, else axis by axis."""
    tensor = x
    axes, sizes, scales, crop = _target(call, tensor, rest)
    check_size(sizes)
    mode = call.attribute("mode", "nearest")
    places = {
        axis: _coordinates(call, tensor.shape[axis], size, scale, crop.get(axis))
        for axis, size, scale in zip(axes, sizes, scales, strict=True)
        if size != tensor.shape[axis] or scale != 1 or axis in crop
    }
    if mode == "nearest":
        return _nearest(call, tensor, places)
    whole = _as_one_op(call, tensor, places, mode)
    if whole is not None:
        return whole
    by_axis = dict(zip(axes, scales, strict=True))
    for axis, positions in places.items():
        matrix = torch.tensor(
            _weights(call, positions, tensor.shape[axis], by_axis[axis], mode).tolist(), dtype=tensor.dtype
        )
        tensor = torch.matmul(tensor.movedim(axis, -1), matrix.T).movedim(-1, axis)
    if crop:
        outside = torch.zeros(tensor.shape, dtype=torch.bool)
        for axis, positions in places.items():
            out = torch.tensor(((positions < 0) | (positions > x.shape[axis] - 1)).tolist())
            outside = outside | out.reshape([-1 if a == axis else 1 for a in range(tensor.ndim)])
        tensor = torch.where(outside, call.attribute("extrapolation_value", 0.0), tensor)
    return tensor


def _target(
    call: NodeCall, tensor: Tensor, rest: tuple[Operand, ...]
) -> tuple[list[int], list[int], list[float], dict[int, tuple[float, float]]]:
    """Return the axes, their new sizes and scales, and the cropped range of each axis."""
    axes = [axis % tensor.ndim for axis in call.attribute("axes") or range(tensor.ndim)]
    old = [tensor.shape[axis] for axis in axes]
    roi, scales, sizes = (*rest, None, None, None)[:3]
    if call.version < 11 or call.node.op_type == "Upsample":
        roi, scales, sizes = None, roi, None
    factors = call.attribute("scales") or ([] if scales is None else call.floats(scales))
    if factors:
        new = [math.floor(size * scale) for size, scale in zip(old, factors, strict=True)]
    else:
        new = call.ints(sizes)
        factors = [size / before for size, before in zip(new, old, strict=True)]
        policy = call.attribute("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(factors)
            new = [int(before * scale + 0.5) for before, scale in zip(old, factors, strict=True)]
    crop: dict[int, tuple[float, float]] = {}
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        ends = call.floats(roi)
        crop = {axis: (ends[i], ends[len(axes) + i]) for i, axis in enumerate(axes)}
    return axes, new, factors, crop


def _coordinates(call: NodeCall, old: int, new: int, scale: float, crop: tuple[float, float] | None) -> Array:
    """Return the input coordinate of each element along an axis of the output."""
    usual = "half_pixel" if call.node.op_type == "Resize" and call.version > 10 else "asymmetric"
    mode = call.attribute("coordinate_transformation_mode", usual)
    y, width = np.arange(new, dtype=np.float64), scale * old
    if mode == "align_corners":
        return np.zeros(new) if width == 1 else y * (old - 1) / (width - 1)
    if mode == "asymmetric":
        return y / scale
    if mode == "tf_crop_and_resize":
        assert crop is not None
        begin, end = crop
        if width == 1:
            return np.full(new, (end - begin) * (old - 1) / 2 + begin * (old - 1))
        return y * (end - begin) * (old - 1) / (width - 1) + begin * (old - 1)
    if mode == "pytorch_half_pixel" and width == 1:
        return np.full(new, -0.5)
    shift = old / 2 * (1 - new / width) if mode == "half_pixel_symmetric" else 0.0
    return shift + (y + 0.5) / scale - 0.5


def _nearest(call: NodeCall, tensor: Tensor, places: dict[int, Array]) -> Tensor:
    old = call.node.op_type == "Upsample" or call.version < 11
    how = call.attribute("nearest_mode", "floor" if old else "round_prefer_floor")
    rounding: Any = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    }[how]
    indices = {
        axis: np.clip(rounding(positions), 0, tensor.shape[axis] - 1).astype(np.int64)
        for axis, positions in places.items()
    }
    usual = all(
        np.array_equal(positions, np.arange(len(positions)) * tensor.shape[axis] // max(len(positions), 1))
        for axis, positions in indices.items()
    )
    if usual and tensor.ndim in _LINEAR and min(indices, default=2) > 1 and tensor.is_floating_point():
        return F.interpolate(tensor, size=_sizes(tensor, indices), mode="nearest")
    for axis, positions in indices.items():
        tensor = tensor.index_select(axis, torch.tensor(positions.tolist(), dtype=torch.int64))
    return tensor


def _sizes(tensor: Tensor, places: dict[int, Array]) -> list[int]:
    """Return the new sizes of the axes after the channels."""
    return [len(places[axis]) if axis in places else tensor.shape[axis] for axis in range(2, tensor.ndim)]


def _as_one_op(call: NodeCall, tensor: Tensor, places: dict[int, Array], mode: str) -> Tensor | None:
    """Interpolate with one torch op; ``None`` if its coordinates differ."""
    name = _LINEAR.get(tensor.ndim) if mode == "linear" else "bicubic" if tensor.ndim == 4 else None
    plain = not call.attribute("antialias", 0) and not call.attribute("exclude_outside", 0)
    plain = plain and call.attribute("cubic_coeff_a", -0.75) == -0.75
    if name is None or not plain or min(places, default=2) < 2:
        return None
    for aligned in (False, True):
        if all(_matches_torch(tensor.shape[axis], positions, aligned) for axis, positions in places.items()):
            return F.interpolate(tensor, size=_sizes(tensor, places), mode=name, align_corners=aligned)
    return None


def _matches_torch(old: int, places: Array, aligned: bool) -> bool:
    """Return whether coordinates along an axis are those of torch's op."""
    new = len(places)
    y = np.arange(new)
    theirs = y * ((old - 1) / max(new - 1, 1)) if aligned else (y + 0.5) * (old / new) - 0.5
    return np.allclose(theirs, places, rtol=0, atol=1e-6)


def _weights(call: NodeCall, places: Array, old: int, scale: float, mode: str) -> Array:
    """Return the matrix that maps an axis of the input to one of the output."""
    whole = np.floor(places).astype(np.int64)
    exact = places == whole
    ratio, base = np.where(exact, 1.0, places - whole), np.where(exact, whole - 1, whole)
    less = min(scale, 1.0) if call.attribute("antialias", 0) else 1.0
    reach = (1 if mode == "linear" else 2) / less
    first, last = math.floor(-reach) + 1, -(math.floor(-reach) + 1) + 1
    steps = np.arange(first, last + 1)
    distance: Array = np.abs(less * (steps[None, :] - ratio[:, None]))
    cubic = call.attribute("cubic_coeff_a", -0.75)
    taps = np.clip(1 - distance, 0, 1) if mode == "linear" else _cubic(distance, cubic)
    index = base[:, None] + steps[None, :]
    if call.attribute("exclude_outside", 0):
        taps = np.where((index < 0) | (index >= old), 0.0, taps)
    taps = taps / taps.sum(1, keepdims=True)
    matrix = np.zeros((len(places), old))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(index, 0, old - 1)), taps)
    return matrix


def _cubic(d: Array, a: float) -> Array:
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


@operator("GridSample")
def grid_sample(call: NodeCall, x: Tensor, grid: Tensor) -> Tensor:
    """Sample at the coordinates of a grid."""
    mode = call.attribute("mode", "bilinear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if mode == "bicubic" and x.ndim != 4:
        raise Unsupported("torch has no cubic interpolation of volumes")
    padding = call.attribute("padding_mode", "zeros")
    return F.grid_sample(x, grid, mode, padding, bool(call.attribute("align_corners", 0)))


@operator("Col2Im")
def col2im(call: NodeCall, x: Tensor, image: Operand, block: Operand) -> Tensor:
    """Sum overlapping blocks into an image."""
    sizes, kernel = call.ints(image), call.ints(block)
    if len(sizes) != 2:
        raise Unsupported("torch sums only blocks with two axes")
    pads = call.attribute("pads") or [0] * 4
    strides, dilations = (call.attribute(name) or [1, 1] for name in ("strides", "dilations"))
    wide = [size + before + after for size, before, after in zip(sizes, pads[:2], pads[2:], strict=True)]
    fold: Any = F.fold  # its annotations omit lists
    folded: Tensor = fold(x, wide, kernel, dilations, 0, strides)
    return folded.narrow(2, pads[0], sizes[0]).narrow(3, pads[1], sizes[1])
