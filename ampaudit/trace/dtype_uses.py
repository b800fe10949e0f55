"""Tells from source code whether a dtype that was read only says in which dtype other tensors are made.

``x.to(other.dtype)`` and ``torch.zeros(n, dtype=x.dtype)`` are casts of the graph, which the FP32 run widens.
``x.dtype == torch.float16`` and ``torch.finfo(x.dtype)`` may send the code another way, and so may anything
that is not understood here.
"""

from __future__ import annotations

import ast
import linecache
from itertools import islice
from types import CodeType

__all__ = ["only_makes_tensors"]

# methods and functions whose result has the dtype that they are given; those that round it while the model
# is traced, as torch.tensor does, are none of them
_CASTS = frozenset({"to", "type"})
_MAKERS = frozenset(
    """
    to zeros ones full empty arange linspace eye rand randn randint
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    softmax log_softmax sum mean prod cumsum cumprod
    """.split()
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def only_makes_tensors(code: CodeType, instruction: int) -> bool:
    """Whether the attribute that an instruction of a function reads is only given to casts and factories.

    Args:
        code: of the function.
        instruction: offset of the instruction, as ``frame.f_lasti`` gives it.
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
    """The syntax tree of a function, and what its line numbers lack; no tree where there is no source."""
    last = max((end for _, end, _, _ in code.co_positions() if end is not None), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    # an indented function stands in a block of its own, so that columns are those of the file
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
    """What a method or a function of a module is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _assigned(node: ast.expr, parent: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    """The name that a value is given: ``dtype = x.dtype``, or its place in ``dtype, n = x.dtype, len(x)``."""
    target: ast.AST | None = None
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
    elif isinstance(parent, ast.Tuple) and isinstance(statement := parents[parent], ast.Assign):
        names = statement.targets[0] if len(statement.targets) == 1 else None
        if isinstance(names, ast.Tuple) and len(names.elts) == len(parent.elts):
            target = names.elts[parent.elts.index(node)]
    return target.id if isinstance(target, ast.Name) else None


def _shared(name: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a name is a variable of other functions, too."""
    return any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in parents)


def _uses(name: str, parents: dict[ast.AST, ast.AST]) -> list[ast.Name]:
    found = (node for node in parents if isinstance(node, ast.Name) and node.id == name)
    return [node for node in found if isinstance(node.ctx, ast.Load)]
