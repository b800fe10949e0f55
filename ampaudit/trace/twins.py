"""Registers twins: plain PyTorch functions that compute what the kernels of custom ops compute."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import SourceError, UsageError, did_you_mean, first_line
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import format_number, forward_slashes
from ampaudit.core.untrusted import describe
from ampaudit.trace.internals import FakeTensor, disable_proxy_modes_tracing, registered_ops
from ampaudit.trace.isolation import preserved
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import is_composite, is_foreign, op_name, written_values
from ampaudit.trace.stack import calling_line, is_tool_file
from ampaudit.trace.values import (
    UNKNOWN_SIZE,
    components,
    dtype_name,
    inexact,
    sizes_of,
    storage_id,
    tensors_in,
)

Writes = Callable[[torch.Tensor], int]
# A kernel adds up in another order and has its own exponential: 4,096 roundings of float32, half of the error
# of one rounding to float16. An audit in 16 bits cannot resolve a smaller difference.
_TOLERANCE = 2.0**-12
_MASK = 1e30  # larger numbers stand for infinity, and say nothing about the size of the others
Function = Callable[..., Any]
_HOW = "write ampaudit.twin('mylib::op', function)"
_TWINS: dict[str, Twin] = {}
_ACTIVE: ContextVar[bool] = ContextVar("twins", default=False)


class TwinFailed(SourceError):
    """Raised if a twin does not compute what its op computes."""

    default_hint = "a twin takes the op's arguments and returns what its kernel returns, on the same device"


@dataclass(frozen=True, slots=True)
class Twin:
    """A function that computes the same as an op."""

    op: str  # name of the op, such as ``mylib::softmax``
    function: Function  # PyTorch function of the op's arguments

    def __call__(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function with the arguments of a call of the op.

        Raises:
            TwinFailed: The function raises, or does not take these arguments. Errors about data-dependent
                control flow are passed on unchanged.
        """
        if self._takes(args, kwargs) is not None:
            args, kwargs = _with_defaults(op, args, kwargs)
        if (problem := self._takes(args, kwargs)) is not None:
            raise self.failed(f"does not take the arguments of {self.op}: {problem}")
        try:
            return self.function(*args, **kwargs)
        except (SourceError, UsageError):
            raise
        except Exception as error:
            if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
                raise
            text = f"raises {type(error).__name__}: {describe(first_line(error), 300)}"
            raise self.failed(text, _line_of(error)) from error

    def _takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return why the function does not take these arguments; ``None`` if it does, or does not say."""
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        except ValueError:
            return None  # a builtin without a signature
        return None

    def failed(self, what: str, line: str = "") -> TwinFailed:
        """Return an error about this twin, at a line of it or where it is defined."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if not line and code is not None:
            line = f"{forward_slashes(code.co_filename)}:{code.co_firstlineno}"
        return TwinFailed(f"{line}{': ' if line else ''}the twin of {self.op} {what}")

    @property
    def identity(self) -> tuple[Any, ...]:
        """The identity of the function, which stays the same if its file is run again."""
        code = getattr(self.function, "__code__", None)
        name = getattr(self.function, "__qualname__", repr(self.function))
        line = code.co_firstlineno if code is not None and "<lambda>" in name else 0
        return getattr(self.function, "__module__", ""), name, line


@dataclass(frozen=True, slots=True)
class TwinCall:
    """A call of an op that is traced through its twin."""

    op: str  # its name
    site: SiteId  # of the call
    called_at: SourceLine | None  # the user's line that calls the op


@overload
def twin(op: str) -> Callable[[Function], Function]: ...
@overload
def twin(op: str, function: Function) -> Function: ...


def twin(op: str, function: Function | None = None) -> Any:
    """Say what a custom op computes, so that ``scan`` and ``plan`` audit its inside.

    Args:
        op: Its name: ``mylib::softmax``, or ``mylib::softmax.out`` for another overload.
        function: Takes the op's arguments and computes in plain PyTorch what the op's kernel does, in the
            kernel's precision (``x.float()`` where that accumulates in float32). Without it, ``twin`` is a
            decorator.

    Returns:
        The function.

    Raises:
        UsageError: There is no such op, it already has a twin, or ``function`` is not a function.
    """
    op_overload = _overload(op)
    if function is None:
        return lambda decorated: twin(op, decorated)
    if not callable(function) or isinstance(function, type):
        raise UsageError(f"the twin of {op} is of type {type(function).__name__}", hint=_HOW)
    new, old = Twin(op_name(op_overload), function), _TWINS.get(str(op_overload))
    if old is not None and old.identity != new.identity:
        name = getattr(old.function, "__qualname__", "another function")
        raise UsageError(f"{op} has a twin already: {describe(name)}", hint="register one function per op")
    _TWINS[str(op_overload)] = new
    return function


def _overload(op: Any) -> OpOverload:
    """Find an op by its name."""
    if not isinstance(op, str) or op.count("::") != 1:
        raise UsageError(f"{describe(repr(op))} does not name an op", hint=_HOW)
    space, _, name = op.partition("::")
    packet, _, rest = name.partition(".")
    namespace = getattr(torch.ops, space)
    op_packet = getattr(namespace, packet, None) if packet.isidentifier() else None
    op_overload = getattr(op_packet, rest or "default", None) if op_packet is not None else None
    if not isinstance(op_overload, OpOverload):
        others = [name.partition(".")[0] for name in registered_ops() if name.startswith(f"{space}::")]
        others += (
            [f"{space}::{packet}.{name}" for name in op_packet.overloads()] if op_packet is not None else []
        )
        hint = f"{did_you_mean(op, others)}import the library that registers the op first"
        raise UsageError(f"there is no op {describe(op)}", hint=hint)
    if not is_foreign(op_overload) or is_composite(op_overload):
        raise UsageError(f"{op} needs no twin", hint="its parts are audited without one")
    return op_overload


def known_twins() -> tuple[int, ...]:
    """Return a key of the registered twins, which changes with each registration."""
    return tuple(map(id, _TWINS.values()))


def twin_of(op: OpOverload) -> Twin | None:
    """Return the twin through which an op is audited; ``None`` where twins are not used."""
    return _TWINS.get(str(op)) if _ACTIVE.get() else None


@contextmanager
def with_twins() -> Iterator[None]:
    """Audit ops through their twins while active; elsewhere a trace keeps the ops themselves."""
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _with_defaults(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the defaults of the op's schema, which the dispatcher leaves out."""
    missing = op._schema.arguments[len(args) :]
    keywords = {a.name: a.default_value for a in missing if a.kwarg_only and a.has_default_value()}
    return (*args, *(a.default_value for a in missing if not a.kwarg_only)), {**keywords, **kwargs}


def _line_of(error: Exception) -> str:
    """Return the innermost line of the traceback outside PyTorch and ampaudit."""
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not is_tool_file(frame.filename)]
    return f"{forward_slashes(user_frames[-1].filename)}:{user_frames[-1].lineno}" if user_frames else ""


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

    ``mode`` records ops while active; ``writes`` counts the writes to a tensor's memory so far.

    Raises:
        TwinFailed: The twin raises, changes an argument that the op does not change, or returns other shapes
            or dtypes than the op.
    """
    expected = _described(called)
    written_ids = {id(value) for value in written_values(called.op, called.args, called.kwargs)}
    unwritten = [tensor for tensor in called.tensors if id(tensor) not in written_ids]
    before = [writes(tensor) for tensor in unwritten]
    with mode:
        result = as_returned(twin, called.op, twin(called.op, called.args, called.kwargs))
        if [writes(tensor) for tensor in unwritten] != before:
            raise twin.failed("changes an argument that the op leaves alone")
        if expected is not None:
            compare_kinds(twin, expected, result)
        used_memory = set(map(storage_id, called.tensors))
        leaves, structure = pytree.tree_flatten(result)
        kinds = leaves if expected is None else pytree.tree_leaves(expected)
        for index, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
            if isinstance(leaf, torch.Tensor):
                dense = leaf.contiguous() if kind.is_contiguous() else leaf
                leaves[index] = dense.clone() if storage_id(dense) in used_memory else dense
                used_memory.add(storage_id(leaves[index]))
        return pytree.tree_unflatten(leaves, structure)


def as_returned(twin: Twin, op: OpOverload, result: Any) -> Any:
    """Return a twin's result in the containers of the op's schema; raise ``TwinFailed`` if it has others."""
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
    """Compare results; raise ``TwinFailed`` if they differ in number, shape or dtype."""
    op_tensors, twin_tensors = tensors_in(expected), tensors_in(result)
    if len(op_tensors) != len(twin_tensors):
        raise twin.failed(f"returns {len(twin_tensors)} tensors; the op returns {len(op_tensors)}")
    for op, actual in zip(op_tensors, twin_tensors, strict=True):
        sizes = zip(sizes_of(op), sizes_of(actual), strict=False)
        alike = all(a == b or UNKNOWN_SIZE in (a, b) for a, b in sizes) and op.ndim == actual.ndim
        if not alike or op.dtype != actual.dtype:
            raise twin.failed(f"returns {_kind(actual)}; the op returns {_kind(op)}")


def _described(called: OpCalled) -> Any:
    """Return the op's result on fake tensors; ``None`` where nothing describes it."""
    fakes = [tensor.fake_mode for tensor in called.tensors if isinstance(tensor, FakeTensor)]
    shapes = fakes[0].shape_env if fakes else None
    try:
        with (
            disable_proxy_modes_tracing(),
            shapes.ignore_fresh_unbacked_symbols() if shapes is not None else nullcontext(),
        ):
            return called.op(*called.args, **called.kwargs)
    except Exception:  # whatever a user's description raises
        return None


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else type(value).__name__
    return f"{dtype_name(value.dtype)}{list(sizes_of(value))}"


class TwinCheck(TorchDispatchMode):
    """Calls ops by their kernels and compares their twins, once per batch, op and kinds of arguments.

    Where there is no kernel, the twin's result is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unchecked: dict[str, str] = {}  # for each op whose kernel cannot run here, the reason
        self.checked: set[str] = set()  # ops whose twin agrees with the kernel
        self._compared_calls: set[tuple[Any, ...]] = set()

    def begin_batch(self) -> None:
        """Compare every op again, with the values of another batch."""
        self._compared_calls.clear()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        try:
            result = op(*args, **kwargs)
        except Exception as error:  # whatever a kernel raises that this device cannot run
            self.unchecked[twin.op] = _reason(error)
            outputs = written_values(op, args, kwargs)
            for output, value in zip(outputs, written_values(op, own_args, own_kwargs), strict=True):
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
    return (check or TwinCheck()) if _TWINS and _ACTIVE.get() else nullcontext()


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _compare_values(twin: Twin, expected: Any, results: Any, where: str) -> None:
    """Compare results within the rounding of FP32; raise ``TwinFailed`` if a value differs by more."""
    for op, actual in zip(pytree.tree_leaves(expected), pytree.tree_leaves(results), strict=True):
        if not isinstance(op, torch.Tensor) or torch.equal(op, actual):
            continue
        wrong = _differing(op, actual).flatten()
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            pair = (format_number(float(components(tensor).flatten()[index])) for tensor in (actual, op))
            of = f"{int(wrong.sum()):,} of {wrong.numel():,} values differ"
            raise twin.failed(f"computes something else: {where}{' instead of '.join(pair)} ({of})")


def _differing(op: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return which elements differ by more than rounding."""
    eps = torch.finfo(op.dtype).eps if inexact(op) else 0.0
    first, second = components(op).double(), components(actual).double()
    if not eps:
        return first != second
    sized = first[first.abs() < _MASK]
    scale = sized.square().mean().sqrt() if sized.numel() else 0.0
    near = (first - second).abs() <= max(_TOLERANCE, 2 * eps) * (first.abs() + scale)
    return ~(near | (first == second) | (first.isnan() & second.isnan()))
