"""Interprets the constructors of autocast contexts and gradient scalers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.flow import objects, tensors
from ampaudit.linter.flow.gradient_facts import YES
from ampaudit.linter.flow.script import dotted_name
from ampaudit.linter.flow.values import Autocast, LiteralValue, Scaler, Value, key_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.calls import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["make_autocast", "make_scaler"]


def make_autocast(
    interpreter: Interpreter, node: ast.Call, device: str | None, arguments: Arguments
) -> Autocast:
    """Interpret ``torch.autocast(device_type, dtype, enabled)``, or an older name for one device."""
    names = ("enabled", "dtype") if device is not None else ("device_type", "dtype", "enabled")
    given: dict[str, Value | None] = {name: arguments.get(i, name) for i, name in enumerate(names)}
    device_type = objects.device_of(given.get("device_type")) if device is None else device
    dtype: str | None = ""
    if given["dtype"] is not None:
        dtype = tensors.dtype_named(given["dtype"]) or None
        if isinstance(given["dtype"], LiteralValue) and given["dtype"].value is None:
            dtype = ""
    if dtype in ("float32", "float64"):
        return Autocast(False, device_type or None, "", node)  # torch warns, and switches it off
    enabled = _enabled(interpreter, given["enabled"], arguments.expression(names.index("enabled"), "enabled"))
    conditional = given["enabled"] is not None and not isinstance(given["enabled"], LiteralValue)
    return Autocast(enabled, device_type or None, dtype, node, conditional=conditional)


def _enabled(interpreter: Interpreter, value: Value | None, expression: ast.expr | None) -> bool | None:
    """Return whether it is enabled; where that depends on a setting, the setting is assumed to be on."""
    if value is None or expression is None:
        return True
    if isinstance(expression, ast.Constant):
        return bool(expression.value)
    assumed = interpreter.assumed_truth(expression)
    if assumed is None and isinstance(value, LiteralValue) and value.value is False:
        return None
    return True if assumed is None and isinstance(expression, ast.Name | ast.Attribute) else assumed


def make_scaler(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> Value:
    """Interpret ``GradScaler(...)`` and the assignment to a name."""
    expression = arguments.expression(99, "enabled")
    enabled = _enabled(interpreter, arguments.keywords.get("enabled"), expression)
    statement = interpreter.statement
    target = (
        statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    )
    text = dotted_name(target) if target is not None else ""
    key = key_of(node)
    if expression is not None and not isinstance(expression, ast.Constant) and enabled is True:
        enabled = True if interpreter.assumed_truth(expression) else None  # by a switch
    scaler = Scaler(key, node, enabled, text)
    interpreter.record_event("scaler.made", node, scaler=key)
    interpreter.state.set_fact(YES, "unused", key)
    return interpreter.register_scaler(scaler) if enabled is not False else scaler
