"""Finds what a script assigns to each name, and the setting that a name follows."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ampaudit.linter.flow.syntax import condition_of, dotted_name, nested_blocks

__all__ = ["Assignment", "assignments_in", "changing_attributes", "followed_settings"]

Condition: TypeAlias = tuple[str, bool]  # a name, and whether it must be true or false


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment to a name.

    Attributes:
        name: dotted name.
        value: the expression.
        condition: that of the innermost ``if`` around it, if it is about one name.
        function: the innermost function around it.
    """

    name: str
    value: ast.expr
    condition: Condition | None
    function: ast.AST | None


def assignments_in(tree: ast.Module) -> list[Assignment]:
    """Return all assignments to dotted names."""
    found: list[Assignment] = []
    pending: list[tuple[ast.stmt, Condition | None, ast.AST | None]] = [(s, None, None) for s in tree.body]
    for node, condition, function in pending:
        inside = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        tested = condition_of(node.test) if isinstance(node, ast.If) else None
        for block in nested_blocks(node):
            is_body = block is getattr(node, "body", None)
            holds = None if tested is None else (tested[0], tested[1] == is_body)
            pending += [(inner, holds, inside) for inner in block]
        if isinstance(node, ast.Assign):
            names = filter(None, map(dotted_name, node.targets))
            found += [Assignment(name, node.value, condition, function) for name in names]
    return found


def changing_attributes(assignments: Iterable[Assignment]) -> frozenset[str]:
    """Return the attributes that several functions set to ``True`` or ``False``: a state, and no settings."""
    functions: dict[str, set[ast.AST | None]] = {}
    for item in assignments:
        if "." in item.name and isinstance(item.value, ast.Constant) and isinstance(item.value.value, bool):
            functions.setdefault(item.name, set()).add(item.function)
    return frozenset(name for name, places in functions.items() if len(places) > 1)


def followed_settings(assignments: Iterable[Assignment]) -> dict[str, Condition]:
    """Return the setting that each name follows, and whether it is true where the setting is.

    A name follows another that it is assigned from, once, or ``not`` that. What is ``None`` unless a
    condition holds, such as a scaler, follows the condition.
    """
    by_name: dict[str, list[Assignment]] = {}
    for item in assignments:
        by_name.setdefault(item.name, []).append(item)
    followed = ((name, _followed_setting(items)) for name, items in by_name.items())
    return {name: setting for name, setting in followed if setting is not None and setting[0] != name}


def _followed_setting(items: list[Assignment]) -> Condition | None:
    """Return the setting that a name with some assignments follows."""
    none = [item.condition for item in items if _is_none(item.value)]
    others = [item for item in items if not _is_none(item.value)]
    if len(others) != 1 or len(none) > 1:
        return None
    value, condition = others[0].value, others[0].condition
    if none:  # it is there where its condition holds, or where that of None does not
        return (none[0][0], not none[0][1]) if condition is None and none[0] is not None else condition
    if isinstance(value, ast.IfExp) and _is_none(value.body) != _is_none(value.orelse):
        tested = condition_of(value.test)
        return None if tested is None else (tested[0], tested[1] != _is_none(value.body))
    if isinstance(value, ast.Name | ast.Attribute | ast.UnaryOp) and condition is None:
        return condition_of(value)
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
