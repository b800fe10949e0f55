"""Rules on the devices that autocast is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampaudit.linter.diagnostic import Mistake, line_of
from ampaudit.linter.flow.events import AutocastMade, ModelCall
from ampaudit.linter.flow.facts import DEVICE
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.objects import applies_to_device
from ampaudit.linter.flow.values import DeviceValue, literal_of
from ampaudit.linter.rules.rule import rule


@rule("AMP847", ModelCall)
def _another_device(flow: Interpreter, event: ModelCall) -> Iterator[Mistake]:
    """Autocast for another device than that of the model."""
    if not applies_to_device(flow, event.model):
        device = flow.state.get(DEVICE, event.model.key)
        yield Mistake(
            event.autocast.node or event.node,
            f"autocast is for {event.autocast.device}, but the model called at line {line_of(event.node)} is "
            f"on {device}, so nothing is cast",
            f'use torch.autocast("{device}")',
        )


@rule("AMP847", AutocastMade)
def _no_device(flow: Interpreter, event: AutocastMade) -> Iterator[Mistake]:
    """Autocast without the device type, which only the older names have by themselves."""
    node, arguments = event.arguments.node, event.arguments
    first = arguments.get(0, "device_type")
    text = literal_of(first)
    is_flag = isinstance(first, DeviceValue) or isinstance(text, bool)
    has_more = "**" in arguments.keywords or any(isinstance(a, ast.Starred) for a in node.args)
    is_known = isinstance(node.func, ast.Attribute) or bool(
        flow.script.imports & {"torch.amp.autocast", "torch.autocast"}
    )
    names_index = isinstance(text, str) and ":" in text  # a device, and not its type
    if (is_known and not has_more and (first is None or is_flag)) or names_index:
        yield Mistake(
            node,
            'torch.autocast needs the device type as a string, such as "cuda", and raises without it',
            'write torch.autocast("cuda", ...), or torch.autocast(device.type, ...)',
        )
