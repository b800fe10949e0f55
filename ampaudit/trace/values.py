"""Reads dtypes, sizes and shared memory of a trace's fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.formats import NumberFormat

__all__ = [
    "CASTABLE_DTYPES",
    "LOW_PRECISION_DTYPES",
    "UNKNOWN_SIZE",
    "WIDE",
    "SharedMemory",
    "dtype_name",
    "fake_arguments",
    "fits",
    "float_value",
    "inexact",
    "sizes_of",
    "sizes_vary",
    "storage_id",
    "torch_dtype",
    "widened",
]

# the 16-bit dtypes (per component), and the dtype that holds each of their values exactly
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
LOW_PRECISION_DTYPES = tuple(WIDE)
# dtypes that a policy may change; float64 is absent on purpose: autocast leaves it alone, and so do we
CASTABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

UNKNOWN_SIZE = -1
_DROPOUT = torch.ops.aten.dropout.default


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node's call with fake tensors, or ``None``, in the places of nodes."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta.get("val"))
    return args, kwargs


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the dtype without its module: ``float16``; ``None`` for no dtype."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(form: NumberFormat) -> torch.dtype:
    """Return the dtype of a number format."""
    dtype: torch.dtype = getattr(torch, form.name)
    return dtype


def widened(value: Any) -> Any:
    """Return arguments with float32 for 16-bit dtype constants; tensors and nodes pass unchanged."""
    return pytree.tree_map_only(torch.dtype, lambda dtype: WIDE.get(dtype, dtype), value)


def inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def float_value(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of an op's (fake) result, if there is one."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            return item
    return None


def _known_size(size: Any) -> int | None:
    """Return the size as a number, or ``None`` if it depends on the data (``x[x > 0]``, ``nonzero``)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    number: int | None = size.node.maybe_as_int()
    return number


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return a tensor's shape, with ``UNKNOWN_SIZE`` for data-dependent sizes; empty for no tensor."""
    numbers = [_known_size(size) for size in getattr(value, "shape", ())]
    return tuple(UNKNOWN_SIZE if number is None else number for number in numbers)


def fits(value: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Return whether a value of a run has the known sizes of its traced counterpart."""
    return value.ndim == len(sizes) and all(
        known in (UNKNOWN_SIZE, size) for size, known in zip(value.shape, sizes, strict=True)
    )


def sizes_vary(value: Any) -> bool:
    """Return whether some tensor of a traced result has a data-dependent size."""
    items = value if isinstance(value, list | tuple) else (value,)
    return any(UNKNOWN_SIZE in sizes_of(item) for item in items)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id shared by tensors in the same memory, including fake ones."""
    return int(tensor.untyped_storage()._cdata)


class SharedMemory:
    """Tracks which values of a traced graph share memory.

    Schemas do not say: ``atleast_3d``, ``contiguous`` and ``to`` return their input or a copy. The fake
    tensors of the trace do, but for a dropout that does nothing: on fake tensors it returns its input.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._same: dict[int, int] = {}
        for node in graph.nodes:
            if node.target is _DROPOUT and not (node.args[2] if len(node.args) > 2 else node.kwargs["train"]):
                self._same[storage_id(node.meta["val"])] = self._root(storage_id(node.args[0].meta["val"]))

    def of(self, value: Any) -> frozenset[int]:
        """Return the memories of a traced value, one for each tensor in it."""
        items = value if isinstance(value, list | tuple) else (value,)
        return frozenset(self._root(storage_id(item)) for item in items if isinstance(item, torch.Tensor))

    def _root(self, number: int) -> int:
        while number in self._same:
            number = self._same[number]
        return number
