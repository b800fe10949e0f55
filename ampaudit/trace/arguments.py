"""Arguments of ops that policies change and that are no tensors: dtypes, and numbers that are operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from ampaudit.policy.schema import Constants
from ampaudit.trace.opnames import (
    CASTABLE_DTYPES,
    argument_names,
    base_name,
    converts,
    named_arguments,
    op_name,
)

__all__ = ["appended", "lowered_dtype", "refuse_mixed_product", "with_clipped_numbers", "with_dtype"]

_PRODUCTS = frozenset(
    """
    addbmm addmm addmv baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    convolution convolution_backward dot einsum linear matmul mm mv vdot
    """.split()
)
# what would be tensors if they were not constants; eps and p are attributes
_OPERANDS = frozenset({"self", "other", "value", "min", "max", "exponent"})


def with_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``dtype=float32`` where the caller left it unset; as autocast does, only for a 16-bit input."""
    given = named_arguments(op, args, kwargs)
    first = given.get(argument_names(op)[0])
    if given.get("dtype") is None and getattr(first, "dtype", None) in CASTABLE_DTYPES:
        return kwargs | {"dtype": torch.float32}
    return kwargs


def appended(op: OpOverload) -> OpOverload:
    """The overload of the norm family that takes a dtype."""
    names = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}
    overload: OpOverload = getattr(op.overloadpacket, names[op._overloadname])
    return overload


def lowered_dtype(op: OpOverload, kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """In a FP32 graph ``dtype=float32`` is what the trace saw, not what the author asked for."""
    if converts(op) or kwargs.get("dtype") is not torch.float32:
        return kwargs
    return kwargs | {"dtype": dtype}


def with_clipped_numbers(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], limits: Constants
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int | str, Any]]:
    """Operands within the limits, and what those that changed were before, by position or name."""
    original_args: dict[int | str, Any] = {}

    def clip(key: int | str, name: str, value: Any) -> Any:
        if name not in _OPERANDS or not isinstance(value, float) or not value or not math.isfinite(value):
            return value
        magnitude = min(max(abs(value), limits.min_positive), limits.max_finite)
        if magnitude != abs(value):
            original_args[key] = value
        return math.copysign(magnitude, value)

    pairs = zip(argument_names(op), args, strict=False)
    made = tuple(clip(position, name, value) for position, (name, value) in enumerate(pairs))
    return made, {name: clip(name, name, value) for name, value in kwargs.items()}, original_args


def refuse_mixed_product(op: OpOverload, args: tuple[Any, ...]) -> None:
    """Raise what a kernel would, and fake tensors do not: a product's factors have one dtype."""
    found = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
    if base_name(op) in _PRODUCTS and len(found) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise RuntimeError(f"{op_name(op)} of {names}: expected both to have the same dtype")
