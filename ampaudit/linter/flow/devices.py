"""Tracks the device of each model, and checks that autocast is for this device."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.flow.facts import DEVICE, PERHAPS
from ampaudit.linter.flow.values import UNKNOWN, DeviceValue, LiteralValue, Model, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["applies_to_device", "device_of", "move_model"]


def device_of(value: Value | None) -> str:
    """Return the device type, such as ``cuda`` for ``"cuda:0"``; empty if it is not a literal."""
    if isinstance(value, DeviceValue):
        return value.type
    text = value.value if isinstance(value, LiteralValue) else ""
    if isinstance(text, str):
        head = text.partition(":")[0]
        return head if head in ("cuda", "cpu", "mps", "xpu") else ""
    return "cuda" if isinstance(text, int) and not isinstance(text, bool) else ""


def move_model(interpreter: Interpreter, model: Model, arguments: Arguments) -> None:
    """Record where ``model.to(...)`` moves a model."""
    for value in arguments.all():
        device = device_of(value)
        if device:
            interpreter.state.set_fact(DEVICE, device, model.key)
        elif value is UNKNOWN or isinstance(value, DeviceValue):
            interpreter.state.set_fact(DEVICE, PERHAPS, model.key)


def applies_to_device(interpreter: Interpreter, node: ast.Call, model: Model) -> bool:
    """Return whether autocast applies to the model's device, as far as is known."""
    autocast, device = interpreter.autocast, interpreter.state.get(DEVICE, model.key)
    if (
        interpreter.assumptions  # as of cuda's absence, where autocast may be off for the same reason
        or autocast.enabled is not True
        or not autocast.device
        or not isinstance(device, str)
        or device == autocast.device
    ):
        return True
    place = autocast.node if autocast.node is not None else node
    interpreter.report(
        "AMP847",
        place,
        f"autocast is for {autocast.device}, but the model called at line {node.lineno} is on {device}, so"
        " nothing is cast",
        f'use torch.autocast("{device}")',
    )
    return False
