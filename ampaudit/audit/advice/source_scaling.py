"""Rewrites ``q @ k / s`` as ``(q / s) @ k``, even if the scores are scaled on another line."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampaudit.audit.advice.interface import LineChange
from ampaudit.audit.advice.source_file import SourceFile, bound_by, parenthesized, replacement
from ampaudit.linter.diagnostic import Fix

__all__ = ["scale_operand"]

_FUNCTIONS = ("torch.matmul", "torch.bmm", "torch.mm")
_METHODS = ("matmul", "bmm", "mm")
_PURE = ("size", "sqrt", "rsqrt")  # calls that give a number and do nothing else


def scale_operand(file: SourceFile, change: LineChange) -> list[Fix]:
    """Return the edits; none if the product or its scaling is not unique on its line."""
    statement = file.statement(change.line.line)
    later = file.statement(change.second.line) if change.second is not None else None
    if statement is None or later is None:
        return []
    if later is statement:
        found = [s for s in _scalings(file, statement) if _operands(file, s[1]) is not None]
        return [replacement(file, found[0][0], _code(file, *found[0][1:]))] if len(found) == 1 else []
    return _on_two_lines(file, statement, later)


Scaling = tuple[ast.expr, ast.expr, ast.expr, str]  # the whole, the product, the number, the operator


def _scalings(file: SourceFile, statement: ast.stmt) -> Iterator[Scaling]:
    """Find divisions and multiplications."""
    for node in file.expressions(statement):
        if not isinstance(node, ast.BinOp):
            continue
        if isinstance(node.op, ast.Div):
            yield node, node.left, node.right, "/"
        elif isinstance(node.op, ast.Mult):
            yield node, node.left, node.right, "*"
            yield node, node.right, node.left, "*"


def _operands(file: SourceFile, node: ast.expr) -> tuple[ast.expr, str, str] | None:
    """Return the first operand of a product, and the code before and after it."""
    first: ast.expr | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        first = node.left
    elif isinstance(node, ast.Call) and not node.keywords:
        is_function = file.dotted(node.func) in _FUNCTIONS and len(node.args) == 2
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        if is_function and not isinstance(node.args[0], ast.Starred):
            first = node.args[0]
        elif is_method and len(node.args) == 1 and isinstance(node.func, ast.Attribute):
            first = node.func.value if not file.dotted(node.func) else None
    if first is None:
        return None
    # parentheses around the operand stand outside of it, and stay
    return first, file.text[file.start(node) : file.start(first)], file.text[file.end(first) : file.end(node)]


def _code(file: SourceFile, product: ast.expr, number: ast.expr, operator: str) -> str:
    """Return the product with its first operand scaled."""
    operands = _operands(file, product)
    assert operands is not None
    first, before, after = operands
    q = file.code(first) if _binds_tightly(first) else f"({file.code(first)})"
    scaled = f"{q} {operator} {parenthesized(file, number)}"
    if before.endswith("(") and after.startswith(")") and isinstance(product, ast.BinOp):
        before, after = before[:-1], after[1:]
    inside = isinstance(product, ast.Call) and before.rstrip().endswith("(") and product.args[:1] == [first]
    return f"{before}{scaled}{after}" if inside else f"{before}({scaled}){after}"


def _binds_tightly(node: ast.expr) -> bool:
    atoms = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.MatMult)
    return isinstance(node, atoms) or product


def _on_two_lines(file: SourceFile, first: ast.stmt, second: ast.stmt) -> list[Fix]:
    """Match ``s = q @ k`` and a single later scaling of ``s`` by a number in the same block."""
    block = file.block(first)
    if second not in block or not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return []
    target, product = first.targets[0], first.value
    between = block[block.index(first) : block.index(second)]
    if not isinstance(target, ast.Name) or _operands(file, product) is None or not between:
        return []
    scaling = _the_scaling(file, second, target.id)
    if scaling is None:
        return []
    whole, number, operator = scaling
    names = {node.id for node in ast.walk(number) if isinstance(node, ast.Name)}
    later = bound_by(between[1:])
    if not _is_pure(number) or names & (later | {target.id}) or target.id in later:
        return []
    scaled = replacement(file, product, _code(file, product, number, operator))
    if whole is not None:
        return [scaled, replacement(file, whole, target.id)]
    removal = file.removal(second)
    return [scaled, removal] if removal is not None else []


def _the_scaling(
    file: SourceFile, statement: ast.stmt, name: str
) -> tuple[ast.expr | None, ast.expr, str] | None:
    """Return the scaling of a name: expression (``None`` for the whole statement), number, operator."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        how = {ast.Div: "/", ast.Mult: "*"}.get(type(statement.op))
        return (None, statement.value, how) if how and statement.target.id == name else None
    found = [s for s in _scalings(file, statement) if isinstance(s[1], ast.Name) and s[1].id == name]
    if len(found) != 1:
        return None
    whole, _, number, operator = found[0]
    is_all = (
        isinstance(statement, ast.Assign)
        and statement.value is whole
        and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]
    )
    return (None if is_all else whole), number, operator


def _is_pure(number: ast.expr) -> bool:
    """Return whether an expression gives the same number on another line of its block."""
    for node in ast.walk(number):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if name not in _PURE:
                return False
        elif isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda):
            return False
    return True
