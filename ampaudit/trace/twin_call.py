"""Traces what twins compute in place of their ops, and compares the kinds of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.trace.internals import FakeTensor, disable_proxy_modes_tracing
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import written_values
from ampaudit.trace.stack import calling_line
from ampaudit.trace.twins import Twin, TwinCall, TwinFailed
from ampaudit.trace.values import UNKNOWN_SIZE, dtype_name, sizes_of, storage_id

__all__ = ["OpenTwins", "as_returned", "call_traced", "compare_kinds"]

Writes = Callable[[torch.Tensor], int]


class OpenTwins:
    """The stack of calls whose twins are running."""

    def __init__(self) -> None:
        self._open: list[TwinCall] = []

    @property
    def innermost(self) -> TwinCall | None:
        """The call whose twin runs; ``None`` outside of twins."""
        return self._open[-1] if self._open else None

    @property
    def outermost(self) -> TwinCall | None:
        """The call in the model's code."""
        return self._open[0] if self._open else None

    @contextmanager
    def entered(self, op: str, site: SiteId) -> Iterator[None]:
        """While active, ops are part of the twin of an op.

        Raises:
            TwinFailed: The twin calls its own op.
        """
        if any(call.op == op for call in self._open):
            hint = "compute the same with PyTorch's ops"
            raise TwinFailed(f"the twin of {op} calls {op} itself", hint=hint)
        line = self._open[0].called_at if self._open else calling_line()
        self._open.append(TwinCall(op, site, line))
        try:
            yield
        finally:
            self._open.pop()


def call_traced(twin: Twin, called: OpCalled, mode: AbstractContextManager[Any], writes: Writes) -> Any:
    """Trace a twin in place of its op, and return results in new memory with the layout of the op's results.

    Args:
        twin: The twin of the op.
        called: The op's call, with the policy's casts.
        mode: Dispatch mode that records ops while active.
        writes: Function that counts the writes to a tensor's memory so far.

    Raises:
        TwinFailed: The twin raises, changes an argument that the op does not change, or returns other shapes
            or dtypes than the op.
    """
    expected = _described(called)
    written_ids = {id(value) for value in written_values(called.op, called.args, called.kwargs)}
    unwritten = [t for t in _tensors((called.args, called.kwargs)) if id(t) not in written_ids]
    before = [writes(tensor) for tensor in unwritten]
    with mode:
        result = as_returned(twin, called.op, twin(called.op, called.args, called.kwargs))
        if [writes(tensor) for tensor in unwritten] != before:
            raise twin.failed("changes an argument that the op leaves alone")
        if expected is not None:
            compare_kinds(twin, expected, result)
        used_memory = {storage_id(tensor) for tensor in _tensors((called.args, called.kwargs))}

        leaves, structure = pytree.tree_flatten(result)
        kinds = leaves if expected is None else pytree.tree_leaves(expected)
        for index, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
            if isinstance(leaf, torch.Tensor):
                dense = leaf.contiguous() if kind.is_contiguous() else leaf
                leaves[index] = dense.clone() if storage_id(dense) in used_memory else dense
                used_memory.add(storage_id(leaves[index]))
        return pytree.tree_unflatten(leaves, structure)


def as_returned(twin: Twin, op: OpOverload, result: Any) -> Any:
    """Return a twin's result in the containers of the op's schema.

    Raises:
        TwinFailed: The number or type of the results does not match the schema.
    """
    count = len(op._schema.returns)
    several = isinstance(result, tuple | list)
    if count == 0 and result is not None:
        raise twin.failed(f"returns {_kind(result)}; the op returns nothing")
    if count > 1 and not (several and len(result) == count):
        raise twin.failed(f"returns {_kind(result)}; the op returns {count} values")
    if count == 1 and str(op._schema.returns[0].type) == "Tensor" and not isinstance(result, torch.Tensor):
        raise twin.failed(f"returns {_kind(result)}; the op returns a tensor")
    return tuple(result) if count > 1 else result


def compare_kinds(twin: Twin, expected: Any, result: Any) -> None:
    """Compare the number, shapes and dtypes of results.

    Raises:
        TwinFailed: The results differ in number, shape or dtype.
    """
    pairs = list(zip(_tensors(expected), _tensors(result), strict=False))
    if len(_tensors(expected)) != len(_tensors(result)):
        raise twin.failed(
            f"returns {len(_tensors(result))} tensors; the op returns {len(_tensors(expected))}"
        )
    for op, actual in pairs:
        sizes = zip(sizes_of(op), sizes_of(actual), strict=False)
        alike = all(a == b or UNKNOWN_SIZE in (a, b) for a, b in sizes) and op.ndim == actual.ndim
        if not alike or op.dtype != actual.dtype:
            raise twin.failed(f"returns {_kind(actual)}; the op returns {_kind(op)}")


def _described(called: OpCalled) -> Any:
    """Return the op's result on fake tensors; ``None`` where nothing describes it."""
    fakes = [t.fake_mode for t in _tensors((called.args, called.kwargs)) if isinstance(t, FakeTensor)]
    shapes = fakes[0].shape_env if fakes else None
    try:
        with (
            disable_proxy_modes_tracing(),
            shapes.ignore_fresh_unbacked_symbols() if shapes is not None else nullcontext(),
        ):
            return called.op(*called.args, **called.kwargs)
    except Exception:  # whatever a user's description raises
        return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else type(value).__name__
    return f"{dtype_name(value.dtype)}{list(sizes_of(value))}"
