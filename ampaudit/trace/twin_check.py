"""Compares twins with the kernels of their ops, on the values of an FP32 run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import first_line
from ampaudit.core.text import format_number
from ampaudit.core.untrusted import describe
from ampaudit.trace.isolation import preserved
from ampaudit.trace.opnames import written_values
from ampaudit.trace.twin_call import as_returned, compare_kinds
from ampaudit.trace.twins import Twin, active_twins, twin_of
from ampaudit.trace.values import inexact

__all__ = ["TwinCheck", "twins_checked"]

# A kernel adds up in another order and has its own exponential: 4,096 roundings of float32, which is half of
# what one rounding to float16 is allowed to do. An audit in 16 bits cannot tell what is nearer.
_TOLERANCE = 2.0**-12
_MASK = 1e30  # larger numbers stand for infinity, and say nothing about the size of the others


class TwinCheck(TorchDispatchMode):
    """Calls ops by their kernels and compares their twins, once per batch, op and kinds of arguments.

    Where there is no kernel, the twin's result is used.

    Attributes:
        unchecked: For each op whose kernel cannot run here, the reason.
        checked: Ops whose twin agrees with the kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unchecked: dict[str, str] = {}
        self.checked: set[str] = set()
        self._compared_calls: set[tuple[Any, ...]] = set()

    def begin_batch(self) -> None:
        """Compare every op again, with the values of another batch."""
        self._compared_calls.clear()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One op of the model."""
        del types
        twin, kwargs = twin_of(func), kwargs or {}
        if twin is None:
            return func(*args, **kwargs)
        key = (func, repr(pytree.tree_map_only(torch.Tensor, _signature, (args, kwargs))))
        if key in self._compared_calls and twin.op not in self.unchecked:
            return func(*args, **kwargs)
        self._compared_calls.add(key)
        return self._compared(twin, func, args, kwargs)

    def _compared(self, twin: Twin, op: OpOverload, args: Any, kwargs: Any) -> Any:
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with preserved():  # so that a kernel that draws random numbers draws the same
            twin_result = as_returned(twin, op, twin(op, own_args, own_kwargs))
        kernel_outputs, twin_outputs = (
            written_values(op, args, kwargs),
            written_values(op, own_args, own_kwargs),
        )
        try:
            result = op(*args, **kwargs)
        except Exception as error:  # whatever a kernel raises that this device cannot run
            self.unchecked[twin.op] = _reason(error)
            for output, value in zip(kernel_outputs, twin_outputs, strict=True):
                output.copy_(value)
            return twin_result
        compare_kinds(twin, result, twin_result)
        _compare_values(twin, result, twin_result, "")
        _compare_values(twin, (args, kwargs), (own_args, own_kwargs), "what it leaves in its arguments: ")
        self.checked.add(twin.op)
        return result


def _reason(error: Exception) -> str:
    if isinstance(error, NotImplementedError) and "backend" in str(error):
        return "it has no kernel on this device"
    return f"its kernel does not run here: {describe(f'{type(error).__name__}: {first_line(error)}', 200)}"


def twins_checked(check: TwinCheck | None = None) -> AbstractContextManager[Any]:
    """Return a context in which kernels that do not run here are replaced by their twins, if any is used."""
    return (check or TwinCheck()) if active_twins() else nullcontext()


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _compare_values(twin: Twin, expected: Any, results: Any, where: str) -> None:
    """Compare results within the rounding of FP32.

    Raises:
        TwinFailed: A value differs by more.
    """
    for op, actual in zip(pytree.tree_leaves(expected), pytree.tree_leaves(results), strict=True):
        if not isinstance(op, torch.Tensor) or torch.equal(op, actual):
            continue
        wrong = _differing(op, actual).flatten()
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            pair = (format_number(float(_real(tensor).flatten()[index])) for tensor in (actual, op))
            of = f"{int(wrong.sum()):,} of {wrong.numel():,} values differ"
            raise twin.failed(f"computes something else: {where}{' instead of '.join(pair)} ({of})")


def _differing(op: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return which elements differ by more than rounding."""
    eps = torch.finfo(op.dtype).eps if inexact(op) else 0.0
    first, second = _real(op), _real(actual)
    if not eps:
        return first != second
    sized = first[first.abs() < _MASK]
    scale = sized.square().mean().sqrt() if sized.numel() else 0.0
    near = (first - second).abs() <= max(_TOLERANCE, 2 * eps) * (first.abs() + scale)
    return ~(near | (first == second) | (first.isnan() & second.isnan()))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.double()
