"""Reads dtypes, sizes and shared memory of a trace's fake tensors.

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
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.formats import NumberFormat
from ampaudit.core.ops import having
from ampaudit.trace.opnames import argument_names, base_name

# the 16-bit dtypes (per component), and the dtype that holds each of their values exactly
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
LOW_PRECISION_DTYPES = tuple(WIDE)
# dtypes that a policy may change; float64 is absent on purpose: autocast leaves it alone, and so do we
CASTABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

UNKNOWN_SIZE = -1
_DROPOUT = torch.ops.aten.dropout.default


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node's call, with each node replaced by its fake tensor or ``None``."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta.get("val"))
    return args, kwargs


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the dtype without its module: ``float16``; ``None`` for no dtype."""
    return str(dtype).removeprefix("torch.")


def node_dtype(node: object) -> torch.dtype | None:
    """Return the dtype of the tensor that a node computes; ``None`` for other nodes and values."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def components(tensor: torch.Tensor) -> torch.Tensor:
    """Return real and imaginary parts along a new last dimension; a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def torch_dtype(form: NumberFormat) -> torch.dtype:
    """Return the dtype of a number format."""
    dtype: torch.dtype = getattr(torch, form.name)
    return dtype


def widened(value: Any) -> Any:
    """Return arguments with float32 for 16-bit dtype constants; tensors and nodes pass unchanged."""
    return pytree.tree_map_only(torch.dtype, lambda dtype: WIDE.get(dtype, dtype), value)


def widened_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Widen 16-bit tensors to float32 or complex64; return other tensors unchanged."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


def widened_value(value: Any) -> Any:
    """Apply ``widened_tensor`` to tensors; return other values unchanged."""
    return widened_tensor(value) if isinstance(value, torch.Tensor) else value


def inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, such as the arguments of a call."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def float_value(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of an op's (fake) result, if there is one."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return a tensor's shape, with ``UNKNOWN_SIZE`` for sizes that depend on data; empty for no tensor."""
    sizes = getattr(value, "shape", ())
    numbers = (s.node.maybe_as_int() if isinstance(s, torch.SymInt) else int(s) for s in sizes)
    return tuple(UNKNOWN_SIZE if number is None else number for number in numbers)


def fits(value: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Return whether a value of a run has the known sizes of its traced counterpart."""
    return value.ndim == len(sizes) and all(
        expected in (UNKNOWN_SIZE, size) for size, expected in zip(value.shape, sizes, strict=True)
    )


def sizes_vary(value: Any) -> bool:
    """Return whether some tensor of a traced result has a data-dependent size."""
    return any(UNKNOWN_SIZE in sizes_of(tensor) for tensor in tensors_in(value))


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
        """Return the memories of a traced value, one for each tensor in it that is not sparse."""
        dense = (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided)
        return frozenset(self._root(storage_id(tensor)) for tensor in dense)

    def _root(self, number: int) -> int:
        while number in self._same:
            number = self._same[number]
        return number


def promoted(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype to which floating-point tensors promote; 0-dimensional ones give way to others."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    dtype = None
    for tensor in [t for t in floats if t.ndim] or floats:
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def computing_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype to which a call with these (fake) arguments converts operands, if any."""
    if not (torch.Tag.pointwise in op.tags or _numbers_in_16_bits(op)):
        return None
    dtype = promoted(tensors_in((args, kwargs)))
    return dtype if dtype in LOW_PRECISION_DTYPES else None


def is_converted(value: Any, dtype: torch.dtype) -> bool:
    """Return whether type promotion converts an operand to a dtype, that of the floats with dimensions.

    It converts tensors of integers, and floats without dimensions.
    """
    if not isinstance(value, torch.Tensor) or value.dtype in (dtype, torch.bool) or value.is_complex():
        return False
    return not value.ndim or not value.is_floating_point()


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
    if base_name(op).rstrip("_") not in having("number_in_own_type"):
        return frozenset()
    return frozenset(a.name for a in op._schema.arguments if str(a.type) in ("number", "Scalar", "float"))
