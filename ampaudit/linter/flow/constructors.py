"""Interprets the constructors of autocast contexts and gradient scalers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import key_of
from ampaudit.linter.flow import tensors
from ampaudit.linter.flow.contexts import Autocast
from ampaudit.linter.flow.devices import device_of
from ampaudit.linter.flow.events import ScalerMade
from ampaudit.linter.flow.facts import UNUSED
from ampaudit.linter.flow.syntax import dotted_name
from ampaudit.linter.flow.values import DeviceValue, LiteralValue, Scaler, Value, literal_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["make_autocast", "make_scaler"]


def make_autocast(
    interpreter: Interpreter, node: ast.Call, device: str | None, arguments: Arguments
) -> Autocast:
    """Interpret ``torch.autocast(device_type, dtype, enabled)``, or an older name for one device."""
    if device is None:
        _check_device_type(interpreter, node, arguments)
    names = ("enabled", "dtype") if device is not None else ("device_type", "dtype", "enabled")
    values: dict[str, Value | None] = {name: arguments.get(i, name) for i, name in enumerate(names)}
    device_type = device_of(values.get("device_type")) if device is None else device
    dtype: str | None = ""
    if values["dtype"] is not None:
        dtype = tensors.dtype_named(values["dtype"]) or None
        if isinstance(values["dtype"], LiteralValue) and values["dtype"].value is None:
            dtype = ""
    if dtype in ("float32", "float64"):
        return Autocast(False, device_type or None, "", node)  # torch warns, and switches it off
    enabled = _enabled(
        interpreter, values["enabled"], arguments.expression(names.index("enabled"), "enabled")
    )
    conditional = values["enabled"] is not None and not isinstance(values["enabled"], LiteralValue)
    cache = arguments.keywords.get("cache_enabled", LiteralValue(True))
    caches = literal_of(cache) is True
    return Autocast(enabled, device_type or None, dtype, node, conditional=conditional, caches=caches)


def _check_device_type(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> None:
    """Report a call that leaves out the device type, which only the older names have by themselves."""
    first = arguments.get(0, "device_type")
    imports = interpreter.script.imports & {"torch.amp.autocast", "torch.autocast"}
    is_flag = isinstance(first, DeviceValue) or isinstance(literal_of(first), bool)
    has_more = "**" in arguments.keywords or any(isinstance(a, ast.Starred) for a in node.args)
    text = literal_of(first)
    names_index = isinstance(text, str) and ":" in text  # a device, and not its type
    if (
        (imports or isinstance(node.func, ast.Attribute)) and not has_more and (first is None or is_flag)
    ) or names_index:
        interpreter.report(
            "AMP853",
            node,
            'torch.autocast needs the device type as a string, such as "cuda", and raises without it',
            'write torch.autocast("cuda", ...), or torch.autocast(device.type, ...)',
        )


def _enabled(interpreter: Interpreter, value: Value | None, expression: ast.expr | None) -> bool | None:
    """Return whether it is enabled; where that depends on a setting, the setting is assumed to be on."""
    if value is None or expression is None:
        return True
    if isinstance(expression, ast.Constant):
        return bool(expression.value)
    assumed = interpreter.assumed_truth(expression)
    if assumed is None and isinstance(expression, ast.Subscript) and value == LiteralValue(True):
        return True
    if assumed is None and literal_of(value) is False:
        return None
    return True if assumed is None and isinstance(expression, ast.Name | ast.Attribute) else assumed


def make_scaler(interpreter: Interpreter, node: ast.Call, path: str, arguments: Arguments) -> Value:
    """Interpret ``GradScaler(...)`` and the assignment to a name."""
    expression = arguments.expression(99, "enabled")
    enabled = _enabled(interpreter, arguments.keywords.get("enabled"), expression)
    statement = interpreter.statement
    target = (
        statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    )
    text = dotted_name(target) if target is not None else ""
    key = key_of(node) + interpreter.call_path
    if expression is not None and not isinstance(expression, ast.Constant) and enabled is True:
        enabled = True if interpreter.assumed_truth(expression) else None  # by a switch
    device_value = None if path.startswith(("torch.cuda", "torch.cpu")) else arguments.get(0, "device")
    default = "cpu" if path.startswith("torch.cpu") else "cuda"
    device = default if device_value is None else device_of(device_value)
    scaler = Scaler(key, node, enabled, text, device, "Sharded" in path)
    interpreter.record(ScalerMade(interpreter.at(node), key))
    interpreter.state.set_fact(UNUSED, True, key)
    return interpreter.register_scaler(scaler) if enabled is not False else scaler
