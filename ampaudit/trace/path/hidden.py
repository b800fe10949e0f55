"""Hides a trace from the model's code, which then takes the path that it takes without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ampaudit.trace.internals import (
    FakeTensor,
    Replacement,
    compiler,
    export_trace,
    fx_tracing,
    looking_up_fake_tensors,
    patched,
)
from ampaudit.trace.stack import is_tool_file

__all__ = ["hidden_trace"]


class _TrueInsideTorch:
    """A flag that is true in torch's own code only, whatever name a function that returns it has."""

    def __bool__(self) -> bool:
        return is_tool_file(sys._getframe(1).f_code.co_filename)


class _NoTensor:
    """Stands for the class of fake tensors in a model's code: no tensor is an instance."""


class _FakeTensorInsideTorch(ModuleType):
    """A module that gives the class of fake tensors to torch's own code only."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802
        return FakeTensor if is_tool_file(sys._getframe(1).f_code.co_filename) else _NoTensor


@contextmanager
def hidden_trace() -> Iterator[None]:
    """Answer with no while active if a model's code asks whether it is being traced."""
    flag = _TrueInsideTorch()

    @contextmanager
    def flags_set() -> Iterator[None]:
        names = ("_is_compiling_flag", "_is_exporting_flag")
        with patched(Replacement(compiler, name, flag) for name in names):
            yield

    replacements = (
        Replacement(export_trace, "_compiling_state_context", flags_set),
        Replacement(fx_tracing, "is_fx_tracing", lambda: flag),
    )
    with patched(replacements), looking_up_fake_tensors(_FakeTensorInsideTorch):
        yield
