"""Checks the expressions over sizes in an exported program, which torch evaluates and we do not."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

__all__ = ["check_expression"]

_MAX_LENGTH = 20_000
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.Attribute, ast.Subscript, ast.keyword),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
# functions of sympy and of torch.utils._sympy.functions; of Python and math in guards
_FUNCTION = re.compile(
    r"[A-Z][A-Za-z0-9]*|abs|bool|ceil(?:ing)?|float|floor|int|log|max|min|round|sqrt|trunc"
)
_METHODS = frozenset({"dim", "ndim", "numel", "shape", "size", "storage_offset", "stride"})
_NAME = re.compile(r"(?!.*__)[A-Za-z_]\w*", re.ASCII)


@lru_cache(4096)
def check_expression(text: str) -> str:
    """Return an expression or guard if it consists of numbers, sizes, and functions of them.

    Raises:
        ValueError: it is anything else.
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError
        for node in ast.walk(ast.parse(text, mode="eval")):
            if not isinstance(node, _NODES) or not _is_plain(node):
                raise ValueError
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("an expression over sizes holds something else") from None
    return text


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return _NAME.fullmatch(node.id) is not None
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS or _is_function(node)
    if isinstance(node, ast.Call):
        return _is_function(node.func) or (
            isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        )
    return not isinstance(node, ast.keyword) or isinstance(node.value, ast.Constant)


def _is_function(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_math = isinstance(node.value, ast.Name) and node.value.id in ("math", "torch")
        return of_math and _FUNCTION.fullmatch(node.attr.removeprefix("sym_")) is not None
    return isinstance(node, ast.Name) and _FUNCTION.fullmatch(node.id) is not None
