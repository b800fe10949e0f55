"""Rules on settings on which autocast and scaler must agree: the switch and the dtype."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.events import AutocastEntered, Backward, Event, ScalerScale, of_type
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.statement_context import tests_around
from ampaudit.linter.flow.syntax import dotted_name, keyword_value

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_settings"]

_TESTS_DTYPE = re.compile(r"dtype\b.*(?:==|is|in) .*(?:float16|fp16|half)")
_DTYPE_NAME = re.compile(r"dtype|precision")


def check_settings(interpreter: Interpreter, events: list[Event]) -> None:
    """Check the autocast blocks around the losses that a scaler scales."""
    entered = [e for e in of_type(events, AutocastEntered) if isinstance(e.context.node, ast.Call)]
    for scale in of_type(events, ScalerScale):
        scaler = interpreter.scalers.get(scale.scaler)
        if scaler is not None and isinstance(scaler.node, ast.Call) and len(entered) == 1:
            _check_bfloat16(interpreter, entered[0], scaler.node)
    for event in entered:
        _check_dtype(interpreter, event, events)


def _check_bfloat16(interpreter: Interpreter, entered: AutocastEntered, scaler: ast.Call) -> None:
    """Report a scaler that is on whichever dtype was chosen."""
    assert isinstance(entered.context.node, ast.Call)
    dtype = keyword_value(entered.context.node, "dtype")
    name = dotted_name(dtype) if dtype is not None else ""
    if scaler.keywords or not name:
        return
    values = [ast.unparse(value) for choice, value in _choices(interpreter.script) if choice == name]
    is_chosen = any("torch.bfloat16" in value and "torch.float16" in value for value in values)
    tests = " ".join(tests_around(interpreter.linked, scaler)) if is_chosen else ""
    if is_chosen and not re.search(r"16|dtype|half|precision", tests):
        interpreter.report(
            "AMP818",
            scaler,
            f"this scaler is on also where {name} is bfloat16, whose gradients need no loss scale",
            f"create it with enabled={name} == torch.float16",
            certainty=Certainty.LIKELY,
        )


def _choices(script: Script) -> Iterator[tuple[str, ast.expr]]:
    """Yield names like ``amp_dtype`` with the expressions that choose their values."""
    for name, values in script.assigned.items():
        if _DTYPE_NAME.search(name):
            yield from ((name, value) for value in values if isinstance(value, ast.IfExp | ast.Subscript))


def _check_dtype(interpreter: Interpreter, entered: AutocastEntered, events: list[Event]) -> None:
    """Report autocast with its default dtype where a name holds the dtype that was chosen."""
    call = entered.context.node
    assert isinstance(call, ast.Call)
    if (
        entered.context.enabled is False
        or len(call.args) > 1
        or any(k.arg in ("dtype", None) for k in call.keywords)
        or not of_type(events, Backward)
    ):
        return
    for scale in of_type(events, ScalerScale):
        scaler = interpreter.scalers.get(scale.scaler)
        call_of_scaler = scaler.node if scaler is not None else None
        switch = keyword_value(call_of_scaler, "enabled") if isinstance(call_of_scaler, ast.Call) else None
        if switch is not None and _TESTS_DTYPE.search(ast.unparse(switch)):
            interpreter.report(
                "AMP856",
                call,
                "this autocast computes in its default dtype, float16 on CUDA, although the scaler at line"
                f" {switch.lineno} is on only for one of several dtypes",
                "pass the configured dtype to autocast as well",
                certainty=Certainty.LIKELY,
            )
            return
    for name, value in _choices(interpreter.script):
        text = ast.unparse(value)
        if "torch.bfloat16" in text and "torch.float16" in text:
            interpreter.report(
                "AMP856",
                call,
                "this autocast computes in its default dtype, float16 on CUDA, although line "
                f"{value.lineno} chooses one as {name}",
                f"pass dtype={name}",
                certainty=Certainty.LIKELY,
            )
            return
