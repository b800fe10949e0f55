"""Autocast contexts and gradient scalers as they are made."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.flow import objects, tensors
from ampaudit.lint.flow.facts import YES
from ampaudit.lint.flow.script import dotted
from ampaudit.lint.flow.values import Autocast, Const, Scaler, Value

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = ["autocast", "made_scaler"]


def autocast(machine: Machine, node: ast.Call, device: str | None, arguments: Arguments) -> Autocast:
    """``torch.autocast(device_type, dtype, enabled)``, or an older spelling for one device."""
    names = ("enabled", "dtype") if device is not None else ("device_type", "dtype", "enabled")
    given: dict[str, Value | None] = {name: arguments.get(i, name) for i, name in enumerate(names)}
    spoken = objects.device_of(given.get("device_type")) if device is None else device
    dtype: str | None = ""
    if given["dtype"] is not None:
        dtype = tensors.dtype_of(given["dtype"]) or None
        if isinstance(given["dtype"], Const) and given["dtype"].value is None:
            dtype = ""
    if dtype in ("float32", "float64"):
        return Autocast(False, spoken or None, "", node)  # torch warns, and switches it off
    enabled = _enabled(machine, given["enabled"], arguments.expression(names.index("enabled"), "enabled"))
    switch = given["enabled"] is not None and not isinstance(given["enabled"], Const)
    return Autocast(enabled, spoken or None, dtype, node, switch=switch)


def _enabled(machine: Machine, value: Value | None, expression: ast.expr | None) -> bool | None:
    """Whether it is on: what depends on a switch is looked at with the switch on."""
    if value is None or expression is None:
        return True
    if isinstance(expression, ast.Constant):
        return bool(expression.value)
    assumed = machine.truth(expression)
    if assumed is None and isinstance(value, Const) and value.value is False:
        return None
    return True if assumed is None and isinstance(expression, ast.Name | ast.Attribute) else assumed


def made_scaler(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    """``GradScaler(...)``, and the name it is given."""
    expression = arguments.expression(99, "enabled")
    enabled = _enabled(machine, arguments.keywords.get("enabled"), expression)
    statement = machine.statement
    target = (
        statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    )
    text = dotted(target) if target is not None else ""
    key = f"L{node.lineno}:{node.col_offset}"
    if expression is not None and not isinstance(expression, ast.Constant) and enabled is True:
        enabled = True if machine.truth(expression) else None  # by a switch
    scaler = Scaler(key, node, enabled, text)
    machine.note("scaler.made", node, scaler=key)
    machine.live.put(YES, "unused", key)
    return machine.seen_scaler(scaler) if enabled is not False else scaler
