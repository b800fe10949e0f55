"""Tells which dtypes kernels take, by calling them on zeros and reading their errors."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.trace.internals import without_autocast, without_modes
from ampaudit.trace.isolation import seeded
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import base_name, example_size, is_foreign, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES, WIDE

__all__ = ["KernelTrials", "rejected_number", "says_no_kernel", "takes_low_precision"]

# what torch says where an op has no kernel for a 16-bit format
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|Unsupported dtype|[Ll]ow precision dtypes not"
)
# arguments that CUDA kernels convert to the dtype of the tensor, which raises where they do not fit: found by
# calling every op of ATen with each of its numbers beyond the largest of float16 and bfloat16
_CONVERTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("masked_fill fill index_fill scatter pad constant_pad_nd".split(), ("value",)),
    **dict.fromkeys(("full", "full_like", "new_full"), ("fill_value",)),
    **dict.fromkeys(("hardshrink", "softshrink"), ("lambd",)),
    **dict.fromkeys(("addr", "index_add"), ("alpha", "beta")),
    **dict.fromkeys(("linspace", "logspace"), ("start", "end")),
    "threshold": ("threshold", "value"),
    "pow": ("exponent",),
    "where": ("self", "other"),
}
_LARGEST = 1 << 20  # elements of the arguments that a trial computes with


def says_no_kernel(error: Exception) -> bool:
    """Return whether an error of torch's says that an op has no kernel for a 16-bit format."""
    return bool(_NO_KERNEL.search(str(error)))


def takes_low_precision(called: OpCalled) -> bool:
    """Return whether an argument of a call is a 16-bit tensor."""
    return any(tensor.dtype in LOW_PRECISION_DTYPES for tensor in _tensors(called))


class KernelTrials:
    """Calls kernels on zeros to learn which dtypes they accept, which meta functions do not check.

    Ops that communicate with other processes are not tried.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[Any, ...], bool] = {}
        self._complaints: dict[tuple[Any, ...], str | None] = {}

    def refuses(self, called: OpCalled) -> bool:
        """Return whether a custom op raises for 16-bit tensors of these sizes, but not for FP32."""
        if not is_foreign(called.op) or not takes_low_precision(called) or "c10d" in called.op.namespace:
            return False
        key = (called.op, repr(pytree.tree_map_only(torch.Tensor, _signature, (called.args, called.kwargs))))
        if key not in self._refused:
            self._refused[key] = _error(called) is not None and _error(called, wide=True) is None
        return self._refused[key]

    def complaint(self, called: OpCalled) -> str | None:
        """Return torch's error if an op rejects its mix of floating-point dtypes; ``None`` if it does not.

        Only a mix with a 16-bit dtype counts, and only if the op accepts float32 in place of 16 bits.
        """
        dtypes = tuple(tensor.dtype for tensor in _tensors(called))
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        if len(floats) < 2 or floats.isdisjoint(LOW_PRECISION_DTYPES) or "c10d" in called.op.namespace:
            return None
        key = (called.op, *dtypes)
        if key not in self._complaints:
            error = _error(called)
            refused = error is not None and not says_no_kernel(error) and _error(called, wide=True) is None
            self._complaints[key] = str(error).partition("\n")[0] if refused else None
        return self._complaints[key]


def rejected_number(called: OpCalled) -> str | None:
    """Return a number that a kernel converts to a 16-bit dtype and that does not fit, with the dtype."""
    names = _CONVERTED.get(base_name(called.op).rstrip("_"))
    if names is None:
        return None
    arguments = named_arguments(called.op, called.args, called.kwargs)
    tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
    dtype = arguments.get("dtype") or next((t.dtype for t in tensors if t.dtype is not torch.bool), None)
    if dtype not in LOW_PRECISION_DTYPES:
        return None
    limit = torch.finfo(dtype).max
    for name in names:
        number = arguments.get(name)
        if isinstance(number, int | float) and limit < abs(number) < math.inf:
            return f"{number:g} in {str(dtype).removeprefix('torch.')}"
    return None


def _tensors(called: OpCalled) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((called.args, called.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(example_size, tensor.shape)), tensor.dtype, tensor.device


def _error(called: OpCalled, *, wide: bool = False) -> Exception | None:
    """Return the error of an op on zeros of the same sizes; ``wide`` tries float32 instead of 16 bits.

    Large tensors are tried on the meta device.
    """
    large = sum(math.prod(map(example_size, tensor.shape)) for tensor in _tensors(called)) > _LARGEST

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        sizes, strides = (
            [example_size(size) for size in numbers] for numbers in (tensor.shape, tensor.stride())
        )
        dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
        device = "meta" if large and not is_foreign(called.op) else tensor.device
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device).zero_()

    try:
        with without_modes(), torch.no_grad(), without_autocast(), seeded(0):
            args, kwargs = pytree.tree_map_only(torch.Tensor, zeros, (called.args, called.kwargs))
            args, kwargs = pytree.tree_map_only(torch.SymInt, example_size, (args, kwargs))
            called.op(*args, **kwargs)
    except Exception as error:  # whatever a kernel raises
        return error
    return None
