"""Exports with dimensions that may vary, and says which line of the model fixes one."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ampaudit.core.errors import TraceFailed, first_line
from ampaudit.core.sites import SourceLine
from ampaudit.trace import entry
from ampaudit.trace.failure import lines_of
from ampaudit.trace.internals import Replacement, ShapeEnv, patched
from ampaudit.trace.stack import library_path

__all__ = ["Dimensions", "NarrowedDimensions", "export_module"]

# for each input tensor, the torch.export.Dim of each axis that may vary; None if there is none
Dimensions = tuple[Mapping[int, Any] | None, ...]
_FixedLines = dict[str, tuple[int, SourceLine | None, SourceLine | None]]
_VIOLATED = "Constraints violated"
_RANGE = re.compile(r"^ *(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)$", re.MULTILINE)
_GUARD = re.compile(
    r"Not all values of (\w+) = (.+) in the specified range satisfy the generated guard (.+?)\.?$", re.M
)
_OTHER = re.compile(r"^ {2}(\w+ = (?!Dim\().+)$", re.MULTILINE)


def _model_frames() -> list[traceback.FrameSummary]:
    """Return the stack below the last call of the model."""
    stack = list(traceback.extract_stack())
    calls = [index for index, frame in enumerate(stack) if frame.filename == entry.__file__]
    return stack[calls[-1] :] if calls else []


class NarrowedDimensions(Exception):
    """Raised if an export has to be repeated with smaller ranges.

    Attributes:
        shapes: The ``shapes`` argument of ``export_module`` with smaller ranges.
    """

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.shapes = shapes


def export_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, shapes: Any = None
) -> ExportedProgram:
    """Call ``torch.export`` with dimensions that may vary, if any.

    Raises:
        NarrowedDimensions: The model accepts a smaller range of sizes.
        TraceFailed: The model accepts a single size, or requires a relation between sizes.
    """
    if shapes is None:
        return torch.export.export(module, args, kwargs, strict=False)
    with _noting_fixed() as fixed:
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            if _VIOLATED not in str(error):
                raise
            narrowed = _with_suggested_ranges(error, shapes)
            if narrowed is not None:
                raise NarrowedDimensions(narrowed) from error
            raise _dimension_failure(error, fixed) from error


@contextmanager
def _noting_fixed() -> Iterator[_FixedLines]:
    """Record each dimension that becomes a number while active: the number, and the lines that fix it.

    These are the innermost line of the user's code, and the innermost line of a library that it calls.
    """
    fixed: _FixedLines = {}
    record = ShapeEnv._set_replacement

    def replace(env: Any, symbol: Any, target: Any, message: str) -> None:
        if getattr(target, "is_Integer", False):
            names = (env.source_name_to_debug_name.get(s.name) for s in env.var_to_sources.get(symbol, ()))
            for name in filter(None, names):
                fixed.setdefault(name, (int(target), *lines_of(_model_frames())))
        record(env, symbol, target, message)

    with patched((Replacement(ShapeEnv, "_set_replacement", replace),)):
        yield fixed


def _with_suggested_ranges(error: BaseException, shapes: Any) -> Any | None:
    """Narrow dimensions to the ranges that torch.export suggests; ``None`` if it suggests other changes."""
    text = str(error)
    ranges = {name: (int(low or 0), int(high or 0)) for name, low, high in _RANGE.findall(text)}
    if not ranges or _OTHER.search(text):
        return None

    def narrowed(dim: Any) -> Any:
        if not isinstance(dim, Dim) or dim.__name__ not in ranges:
            return dim
        low, high = ranges[dim.__name__]
        low, high = max(low, dim.min), min(high or dim.max, dim.max)
        return Dim(dim.__name__, min=low, max=high if isinstance(high, int) else None)

    result = pytree.tree_map(narrowed, shapes)
    return None if repr(result) == repr(shapes) else result


def _dimension_failure(error: BaseException, fixed: _FixedLines) -> TraceFailed:
    """Describe a dimension that the model does not let vary."""
    for name, (number, user_line, library) in fixed.items():
        place = f"{user_line.file}:{user_line.line}: " if user_line else ""
        code = f" at '{user_line.code}'" if user_line and user_line.code else ""
        inside = f", in {library_path(library.file)}:{library.line}" if library else ""
        return TraceFailed(
            f"{place}the dimension {name!r} cannot vary: the model fixes it to {number}{code}{inside}",
            hint="give every input that must have the same size the same name; or compute the number from "
            f"the input's shape; or leave {name!r} out of --dynamic",
        )
    relation = _OTHER.search(str(error))
    what = f"the model needs {relation[1]}" if relation else first_line(error)
    guard = _GUARD.search(str(error))
    if guard is not None:
        name, source, condition = guard.groups()
        what = f"not every {name} satisfies {condition.replace(source, name)}"
    return TraceFailed(
        f"the dimensions cannot vary freely: {what}",
        hint="give a range (NAME:LOW-HIGH), or fix that dimension",
    )
