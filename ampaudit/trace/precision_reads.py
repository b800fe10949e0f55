"""Finds where the model's code reads a precision and may then differ from FP32.

Code that never reads a dtype computes the same ops in every precision. A function mode sees reads of
tensors; torch's functions about autocast are replaced while a model is traced.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ampaudit.core.sites import SourceLine
from ampaudit.trace.internals import Replacement, patched, without_torch_function
from ampaudit.trace.stack import code_line, is_library, is_tool_file
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["PrecisionReads", "conversions_of"]

_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
# functions that tell Python code the dtype of one of their arguments
_TELLING: frozenset[Any] = frozenset(
    {
        _DTYPE,
        torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        torch.Tensor.element_size,
        torch.Tensor.type,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.storage,
        torch.Tensor.storage_type,
        torch.Tensor.untyped_storage,
        torch.Tensor.new_tensor,  # a constant that is rounded while the model is traced
        torch.result_type,
    }
)
_AUTOCAST = (
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype",
)
# of torch, these read dtypes on behalf of the model: clamp_probs takes finfo(dtype).eps
_ASKING = "/torch/distributions/"


class PrecisionReads(TorchFunctionMode):
    """Collects the lines of the model's code that read a 16-bit precision.

    Reading a dtype only to create or cast another tensor does not count.

    Attributes:
        lines: the lines in order, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[SourceLine] = []
        self._known: set[tuple[Any, int]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and record it if it reveals a 16-bit dtype."""
        del types
        # x.type(dtype) is a cast
        tells = func in _TELLING and not (func is torch.Tensor.type and len(args) > 1)
        if tells and any(isinstance(arg, torch.Tensor) and _lower(arg) for arg in args):
            self._note(sys._getframe(1), dtype=func == _DTYPE)
        return func(*args) if kwargs is None else func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch tensors and torch's autocast functions while active."""
        replacements = [Replacement(torch, name, self._asked(getattr(torch, name))) for name in _AUTOCAST]
        with patched(replacements), self:
            yield

    def _asked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        enabled = torch.is_autocast_enabled

        def ask(*args: Any) -> Any:
            answer = function(*args)
            if answer is True or (isinstance(answer, torch.dtype) and (enabled("cpu") or enabled("cuda"))):
                self._note(sys._getframe(1), dtype=False)
            return answer

        return ask

    def _note(self, frame: FrameType | None, *, dtype: bool) -> None:
        while frame is not None and _hands_on(frame):
            frame = frame.f_back
        if frame is not None and _ASKING in frame.f_code.co_filename:
            while frame is not None and is_tool_file(frame.f_code.co_filename):
                frame = frame.f_back
        if frame is None or is_tool_file(frame.f_code.co_filename):
            return
        key = (frame.f_code, frame.f_lasti)
        if key in self._known:
            return
        self._known.add(key)
        if not (dtype and _only_makes_tensors(*key)):
            line = code_line(frame.f_code.co_filename, frame.f_lineno)
            if line not in self.lines:
                self.lines.append(line)


def conversions_of(model: nn.Module) -> list[SourceLine]:
    """Return user-defined conversion methods, which may change more than dtypes."""
    found = (getattr(type(m), name) for m in model.modules() for name in ("half", "bfloat16", "to", "_apply"))
    codes = dict.fromkeys(method.__code__ for method in found if hasattr(method, "__code__"))
    files = ((code.co_filename, code.co_firstlineno) for code in codes)
    return [code_line(file, line) for file, line in files if not is_library(file) and not is_tool_file(file)]


def _lower(tensor: torch.Tensor) -> bool:
    with without_torch_function():
        return tensor.dtype in LOW_PRECISION_DTYPES


def _hands_on(frame: FrameType) -> bool:
    """Return whether a frame belongs to torch's dispatch from a tensor to function modes."""
    file = frame.f_code.co_filename
    return frame.f_code.co_name == "__torch_function__" or file.endswith(
        ("/torch/overrides.py", "/torch/_tensor.py")
    )


# methods and functions whose result has the dtype of an argument; torch.tensor is not one of them, because
# its constants are rounded while the model is traced
_CASTS = frozenset({"to", "type"})
_MAKERS = frozenset(
    """
    to zeros ones full empty arange linspace eye rand randn randint
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    softmax log_softmax sum mean prod cumsum cumprod
    """.split()
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _only_makes_tensors(code: CodeType, instruction: int) -> bool:
    """Return whether the attribute is only passed to casts and factory functions.

    ``x.to(other.dtype)`` and ``torch.zeros(n, dtype=x.dtype)`` are casts of the graph, which the FP32 run
    widens. ``x.dtype == torch.float16`` and ``torch.finfo(x.dtype)`` may change what the code computes, and
    so may anything that is not recognized here.

    Args:
        code: the function's code.
        instruction: the instruction's offset, as in ``frame.f_lasti``.
    """
    function, shift = _function(code)
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    if function is None or position is None:
        return False
    line, _, column, end = position
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.Attribute) and node.attr == "dtype" and node.end_lineno is not None:
            place = node.lineno + shift, node.col_offset, node.end_col_offset
            if place == (line, column, end):
                return _harmless(node, parents, frozenset())
    return False


def _function(code: CodeType) -> tuple[_Function | None, int]:
    """Return the syntax tree of a function and its line offset, if its source is known."""
    last = max((end for _, end, _, _ in code.co_positions() if end is not None), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    # wrap an indented function in a block, so that columns are those of the file
    nested = bool(lines) and lines[0][:1].isspace()
    try:
        tree = ast.parse(("if True:\n" if nested else "") + "".join(lines))
    except (SyntaxError, ValueError):
        return None, 0
    found = next((node for node in ast.walk(tree) if isinstance(node, _Function)), None)
    return found, code.co_firstlineno - (2 if nested else 1)


def _harmless(node: ast.expr, parents: dict[ast.AST, ast.AST], followed: frozenset[str]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Expr):
        return True
    if isinstance(parent, ast.Call):
        return node is not parent.func and _callee(parent) in _CASTS
    if isinstance(parent, ast.keyword) and parent.arg == "dtype":
        call = parents[parent]
        return isinstance(call, ast.Call) and _callee(call) in _MAKERS
    name = _assigned(node, parent, parents)
    if name is None or name in followed or _shared(name, parents):
        return name in followed
    return all(_harmless(use, parents, followed | {name}) for use in _uses(name, parents))


def _callee(call: ast.Call) -> str:
    """Return the name of a method or of a module's function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _assigned(node: ast.expr, parent: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Return the variable that a value is assigned to, alone or in ``dtype, n = x.dtype, len(x)``."""
    target: ast.AST | None = None
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
    elif isinstance(parent, ast.Tuple) and isinstance(statement := parents[parent], ast.Assign):
        names = statement.targets[0] if len(statement.targets) == 1 else None
        if isinstance(names, ast.Tuple) and len(names.elts) == len(parent.elts):
            target = names.elts[parent.elts.index(node)]
    return target.id if isinstance(target, ast.Name) else None


def _shared(name: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a name is global or nonlocal."""
    return any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in parents)


def _uses(name: str, parents: dict[ast.AST, ast.AST]) -> list[ast.Name]:
    found = (node for node in parents if isinstance(node, ast.Name) and node.id == name)
    return [node for node in found if isinstance(node.ctx, ast.Load)]
