"""Counts the work of a step op by op, and estimates its best possible time on a device.

In the roofline model (Williams, Waterman and Patterson, 2009), an op takes the longer of its arithmetic at
the device's peak rate and its memory traffic at the peak bandwidth. Real kernels are slower; launches and
caches are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ampaudit.devices.catalogue import Device
from ampaudit.report.bench import Work
from ampaudit.trace.values import dtype_name

_CASTS = (torch.ops.aten._to_copy.default,)
_FREE = (torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one op."""

    flops: int  # floating-point operations
    precision: str  # dtype of the arithmetic
    product: bool  # whether it is a matrix product, a convolution or attention
    bytes_moved: int  # read and written
    cast: bool  # whether it converts between dtypes


class OpCounter(TorchDispatchMode):
    """Records the cost of the ops that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpCost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and func not in _FREE:
            self.ops.append(cost_of(func, args, kwargs, out))
        return out


def cost_of(func: Any, args: Any, kwargs: Any, out: Any) -> OpCost:
    """Return the cost of one call; a tensor passed twice is read once."""
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    count = flop_registry.get(getattr(func, "_overloadpacket", func))  # higher-order ops have no packet
    if func is torch.ops.aten.convolution_backward.default:
        flops = _convolution_backward(args)
    else:
        flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
    floats = [t.dtype for t in inputs if t.is_floating_point()]
    dtype = floats[0] if floats else torch.float32
    cast = func in _CASTS and bool(outputs) and bool(inputs) and outputs[0].dtype != inputs[0].dtype
    bytes_moved = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*inputs, *outputs)}.values())
    return OpCost(flops, dtype_name(dtype), count is not None, bytes_moved, cast)


def _convolution_backward(args: Any) -> int:
    """Count each requested gradient like a forward pass.

    Torch's own counter ignores the groups in a grouped convolution's weight gradient, and counts too much.
    """
    gradient, value, weight = args[:3]
    transposed, output_mask = args[7], args[10]
    per_element = weight[0].numel()  # per channel of the output, or of the input if transposed
    outputs = value.numel() if transposed else gradient.numel()
    return int(2 * outputs * per_element * (bool(output_mask[0]) + bool(output_mask[1])))


def total_work(ops: list[OpCost], *, tf32: bool) -> Work:
    """Sum the costs of a step."""
    flops = sum(op.flops for op in ops)
    fast = flops if tf32 else sum(op.flops for op in ops if op.precision in ("float16", "bfloat16"))
    return Work(
        flops=flops,
        fast_share=fast / flops if flops else 0.0,
        bytes_moved=sum(op.bytes_moved for op in ops),
        cast_bytes=sum(op.bytes_moved for op in ops if op.cast),
    )


def roofline_seconds(ops: Iterable[OpCost], device: Device, *, tf32: bool) -> float | None:
    """Sum the roofline times of ops, in seconds; ``None`` if the device's rates are unknown."""
    if device.bandwidth_gbs is None or device.fp32 is None:
        return None
    total = 0.0
    for op in ops:
        precision = "tf32" if tf32 and op.product else op.precision
        precision = precision if precision in ("float32", "tf32", "float16", "bfloat16") else "float32"
        rate = device.rate(precision, product=op.product)
        assert rate is not None
        total += max(op.flops / (rate * 1e12), op.bytes_moved / (device.bandwidth_gbs * 1e9))
    return total
