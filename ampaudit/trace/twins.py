"""Registers twins: plain PyTorch functions that compute what the kernels of custom ops compute."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch._ops import OpOverload

from ampaudit.core.errors import SourceError, UsageError, did_you_mean, first_line
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import forward_slashes
from ampaudit.core.untrusted import describe
from ampaudit.trace.internals import registered_ops
from ampaudit.trace.opnames import is_composite, is_foreign, op_name
from ampaudit.trace.stack import is_tool_file

__all__ = [
    "Twin",
    "TwinCall",
    "TwinFailed",
    "active_twins",
    "known_twins",
    "twin",
    "twin_of",
    "with_twins",
]

Function = Callable[..., Any]
_HOW = "write ampaudit.twin('mylib::op', function)"
_TWINS: dict[str, Twin] = {}
_ACTIVE: ContextVar[bool] = ContextVar("twins", default=False)


class TwinFailed(SourceError):
    """Raised if a twin does not compute what its op computes."""

    default_hint = "a twin takes the op's arguments and returns what its kernel returns, on the same device"


@dataclass(frozen=True, slots=True)
class Twin:
    """A function that computes the same as an op.

    Attributes:
        op: Name of the op, such as ``mylib::softmax``.
        function: PyTorch function of the op's arguments.
    """

    op: str
    function: Function

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
    def place(self) -> tuple[Any, ...]:
        """The identity of the function, which stays the same if its file is run again."""
        code = getattr(self.function, "__code__", None)
        name = getattr(self.function, "__qualname__", repr(self.function))
        line = code.co_firstlineno if code is not None and "<lambda>" in name else 0
        return getattr(self.function, "__module__", ""), name, line


@dataclass(frozen=True, slots=True)
class TwinCall:
    """A call of an op that is traced through its twin.

    Attributes:
        op: Name of the op.
        site: Site of the call.
        called_at: The user's line that calls the op.
    """

    op: str
    site: SiteId
    called_at: SourceLine | None


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
    if old is not None and old.place != new.place:
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


def active_twins() -> bool:
    """Return whether a twin may be used."""
    return bool(_TWINS) and _ACTIVE.get()


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
