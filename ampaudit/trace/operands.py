"""Tells which operands a kernel converts to the 16-bit dtype of the tensors beside them.

Elementwise ops compute in one dtype, and a 0-dimensional tensor gives way to those with dimensions: in
``logits * scale`` with a scale in float32, float16 logits make the scale float16 first. A Python number is
read in float32 by arithmetic, and in the tensors' dtype by comparisons and a few others:
``x > 0.9999`` in float16 compares with 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.trace.opnames import argument_names, base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["as_read", "computing_dtype", "converted_numbers", "gives_way", "promoted"]

# as in PyTorch's CUDA kernels: those that read numbers as scalar_t, not as opmath_t
_READS_NUMBERS_IN_16_BITS = frozenset(
    """
    copysign eq fmod ge greater greater_equal group_norm gt hardshrink hardshrink_backward isin le less
    less_equal lt native_group_norm ne not_equal pow remainder softshrink softshrink_backward special_xlog1py
    special_xlogy threshold threshold_backward xlogy
    """.split()
)


def promoted(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype in which floating-point tensors meet; those without dimensions give way."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    dtype = None
    for tensor in [t for t in floats if t.ndim] or floats:
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def computing_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype to which a call with these (fake) arguments converts operands, if any."""
    if not (torch.Tag.pointwise in op.tags or _numbers_in_16_bits(op)):
        return None
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    dtype = promoted(tensors)
    return dtype if dtype in LOW_PRECISION_DTYPES else None


def gives_way(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a value is a tensor that is converted to the dtype of those with dimensions."""
    scalar = isinstance(value, torch.Tensor) and not value.ndim and value.is_floating_point()
    return scalar and value.dtype != dtype


def converted_numbers(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with numbers as the kernel reads them; other values as they are."""
    names = _numbers_in_16_bits(op)

    def read(name: str, value: Any) -> Any:
        return as_read(value, dtype) if name in names and type(value) in (int, float) else value

    converted = tuple(read(name, value) for name, value in zip(argument_names(op), args, strict=False))
    return converted, {name: read(name, value) for name, value in kwargs.items()}


def as_read(number: float, dtype: torch.dtype) -> float:
    """Return a number as a dtype holds it."""
    rounded = float(torch.tensor(float(number)).to(dtype))
    return number if rounded == number else rounded


@cache
def _numbers_in_16_bits(op: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that the kernel converts to the dtype in which it computes."""
    if base_name(op).rstrip("_") not in _READS_NUMBERS_IN_16_BITS:
        return frozenset()
    return frozenset(a.name for a in op._schema.arguments if str(a.type) in ("number", "Scalar", "float"))
