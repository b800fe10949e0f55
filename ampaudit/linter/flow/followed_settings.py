"""Finds the setting that a name follows, so that conditions on both are one condition."""

from __future__ import annotations

import ast

from ampaudit.linter.flow.syntax import condition_of, dotted_name, nested_blocks

__all__ = ["followed_settings"]


def followed_settings(tree: ast.Module) -> dict[str, tuple[str, bool]]:
    """Return the setting that each name follows, and whether it is true where the setting is.

    A name follows another that it is assigned from, once, or ``not`` that. What is ``None`` unless a
    condition holds, such as a scaler, follows the condition.
    """
    found: dict[str, list[tuple[ast.expr, tuple[str, bool] | None]]] = {}
    pending: list[tuple[ast.stmt, tuple[str, bool] | None]] = [(node, None) for node in tree.body]
    for node, guard in pending:
        for block in nested_blocks(node):
            condition = condition_of(node.test) if isinstance(node, ast.If) else None
            if condition is not None and block is not getattr(node, "body", None):
                condition = (condition[0], not condition[1])
            pending += [(inner, condition) for inner in block]
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.setdefault(dotted_name(target), []).append((node.value, guard))
    followed = ((name, _followed_setting(values)) for name, values in found.items() if name)
    return {name: setting for name, setting in followed if setting is not None and setting[0] != name}


def _followed_setting(values: list[tuple[ast.expr, tuple[str, bool] | None]]) -> tuple[str, bool] | None:
    """Return the setting that a name with some values follows, where each value may be under a condition."""
    none = [guard for value, guard in values if _is_none(value)]
    others = [(value, guard) for value, guard in values if not _is_none(value)]
    if len(others) != 1 or len(none) > 1:
        return None
    value, guard = others[0]
    if none:  # it is there where its condition holds, or where that of None does not
        opposite = none[0]
        if guard is None and opposite is not None:
            return opposite[0], not opposite[1]
        return guard
    if isinstance(value, ast.IfExp) and _is_none(value.body) != _is_none(value.orelse):
        condition = condition_of(value.test)
        if condition is None:
            return None
        return condition[0], condition[1] != _is_none(value.body)
    if isinstance(value, ast.Name | ast.Attribute | ast.UnaryOp) and guard is None:
        return condition_of(value)
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
