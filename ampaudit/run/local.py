"""Measures the error of a single op, on the reference's inputs rounded to 16 bits.

Calling every op a third time in full would cost a third forward pass, so a large op is called on a few
rows of its input, which come out exactly as they would in the whole. Ops for which no such cut is known
are called in full where their output is small, and have no local error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ampaudit.run.backends import Backend
from ampaudit.run.observer import StepCall
from ampaudit.run.step import Step
from ampaudit.run.views import components
from ampaudit.trace.graph import Role

__all__ = ["local_error"]

FULL_CALL = 1 << 13  # output elements up to which any op is simply called again in full
_ROWS = 8

Index = tuple[slice, ...]
# From the argument values and the output: an index for each argument to be cut, and one for the output.
Cut = Callable[[tuple[Any, ...], torch.Tensor], tuple[dict[int, Index], Index] | None]


def local_error(
    step: Step, backend: Backend, call: StepCall, reference: Any
) -> tuple[torch.Tensor, int] | None:
    """Return ``(stack(sum err^2, sum ref^2), elements)``, or ``None`` if the op cannot be called again."""
    if not isinstance(reference, torch.Tensor) or step.random or step.mutates or step.site is None:
        return None
    if step.site.role is not Role.COMPUTE:
        return None
    cuts: dict[int, Index] = {}
    expected = reference
    if reference.numel() > FULL_CALL:
        find = _CUTS.get(step.site.op)
        plan = find(call.ref_args, reference) if find else None
        if plan is None:
            return None
        cuts, out = plan
        expected = reference[out]
    result = backend.call(step, *_clean_arguments(step, backend, call, cuts))
    if not isinstance(result, torch.Tensor):
        return None
    # a convolution of the top rows also gives rows that saw padding instead of what lies below
    result = result[tuple(slice(0, size) for size in expected.shape)]
    if result.shape != expected.shape:
        return None
    # infinities make the sums infinite, and such a row is left out when the numbers are fetched
    signal = components(expected).reshape(-1)
    error = components(result).to(signal.dtype).reshape(-1) - signal
    return torch.stack([torch.dot(error, error), torch.dot(signal, signal)]), expected.numel()


def _clean_arguments(
    step: Step, backend: Backend, call: StepCall, cuts: dict[int, Index]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments without accumulated error: rounded again, except weights and inputs."""

    def clean(node: fx.Node, index: Index | None = None) -> Any:
        reference, value = call.inputs[node]
        if not isinstance(value, torch.Tensor):
            return reference
        if _is_given(node) or reference is value:
            return value if index is None else value[index]
        reference = reference if index is None else reference[index]
        return backend.represent(reference, getattr(node.meta.get("val"), "dtype", None))

    args, kwargs = backend.arguments(step)
    cleaned = tuple(
        clean(arg, cuts.get(i)) if isinstance(arg, fx.Node) else fx.node.map_arg(arg, clean)
        for i, arg in enumerate(args)
    )
    return cleaned, fx.node.map_arg(kwargs, clean)


def _is_given(node: fx.Node) -> bool:
    """Return whether a value is a placeholder or its cast, so that it is its rounded reference."""
    if node.op == "placeholder":
        return True
    return node.target is torch.ops.aten.to.dtype and node.all_input_nodes[0].op == "placeholder"


def _rows(shape: tuple[int, ...]) -> Index:
    """Take the first index of leading dimensions, eight of the last but one, and all of the last."""
    leading = [slice(0, 1)] * max(len(shape) - 2, 0)
    return (*leading, slice(0, _ROWS), slice(None)) if len(shape) > 1 else (slice(None),)


def _broadcast(shape: tuple[int, ...], out: Index) -> Index:
    """Take the part of a broadcast operand that belongs to the sampled output."""
    aligned = out[len(out) - len(shape) :]
    return tuple(slice(None) if size == 1 else part for size, part in zip(shape, aligned, strict=True))


def _elementwise(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    index = _rows(tuple(out.shape))
    tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    if out.ndim < 2 or any(a.ndim > out.ndim for a in tensors.values()):
        return None
    return {i: _broadcast(tuple(a.shape), index) for i, a in tensors.items() if a.ndim}, index


def _last_dimension(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample rows of linear, norms and softmax over the last dimension, which are independent."""
    if out.ndim < 2:
        return None
    over = args[1] if len(args) > 1 else None
    if isinstance(over, int) and over not in (-1, out.ndim - 1):
        return None
    if isinstance(over, list | tuple) and len(over) != 1:
        return None
    return {0: _rows(tuple(out.shape))}, _rows(tuple(out.shape))


def _matmul(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    first, second = args[0], args[1]
    if first.ndim < 2 or second.ndim < 2 or out.ndim < 2:
        return None
    index = _rows(tuple(out.shape))
    rows = _broadcast(tuple(first.shape[:-1]), index[:-1])
    batch = _broadcast(tuple(second.shape[:-2]), index[:-2])
    return {0: (*rows, slice(None)), 1: (*batch, slice(None), slice(None))}, index


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one image, eight output channels, and the top row, which sees no lower padding."""
    x, weight = args[0], args[1]
    if (len(args) > 6 and args[6] != 1) or x.ndim != out.ndim or out.ndim < 3:
        return None
    stride, padding, dilation = (_first(args, place, default) for place, default in ((3, 1), (4, 0), (5, 1)))
    if not isinstance(padding, int):
        return None
    reach = dilation * (weight.shape[2] - 1) + 1
    rows_in = min(x.shape[2], max(reach - padding, 1))
    rows_out = (rows_in + padding - reach) // stride + 1
    channels = slice(0, 8)
    cuts: dict[int, Index] = {0: (slice(0, 1), slice(None), slice(0, rows_in)), 1: (channels,)}
    if len(args) > 2 and isinstance(args[2], torch.Tensor):
        cuts[2] = (channels,)
    return (cuts, (slice(0, 1), channels, slice(0, rows_out))) if rows_out > 0 else None


def _first(args: tuple[Any, ...], place: int, default: int) -> Any:
    value = args[place] if len(args) > place else default
    return value[0] if isinstance(value, list | tuple) else value


def _attention(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one head of one sequence."""
    if out.ndim != 4:
        return None
    one: Index = (slice(0, 1), slice(0, 1))
    cuts = dict.fromkeys(range(3), one)
    if len(args) > 3 and isinstance(args[3], torch.Tensor):
        if args[3].ndim != 4:
            return None
        cuts[3] = one
    return cuts, one


def _eval_norm(args: tuple[Any, ...], out: torch.Tensor) -> tuple[dict[int, Index], Index] | None:
    """Sample one row of one image from a batch norm with running statistics."""
    if out.ndim < 3 or args[5] is True:
        return None
    index = (slice(0, 1), slice(None), slice(0, 1))
    return {0: index}, index


_ELEMENTWISE_OPS = """
    abs add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Scalar add.Scalar sub.Scalar mul.Scalar
    div.Scalar neg reciprocal sqrt rsqrt square pow.Tensor_Scalar pow.Tensor_Tensor exp exp2 expm1 log
    log2 log10 log1p sigmoid tanh sin cos erf relu relu6 gelu silu mish elu selu celu leaky_relu
    hardswish hardsigmoid softplus log_sigmoid clamp clamp_min clamp_max maximum minimum where.self
""".split()
_CUTS: dict[str, Cut] = {
    **{f"aten.{name}" if "." in name else f"aten.{name}.default": _elementwise for name in _ELEMENTWISE_OPS},
    "aten.linear.default": _last_dimension,
    "aten.layer_norm.default": _last_dimension,
    "aten.rms_norm.default": _last_dimension,
    "aten.softmax.int": _last_dimension,
    "aten.log_softmax.int": _last_dimension,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.batch_norm.default": _eval_norm,
}
