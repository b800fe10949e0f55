"""Interprets the weights of models and copies of them."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.flow.events import WeightsAveraged
from ampaudit.linter.flow.facts import FROZEN
from ampaudit.linter.flow.state import item_of
from ampaudit.linter.flow.tensors import requested_dtype
from ampaudit.linter.flow.values import UNKNOWN, Parameters, Value, literal_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["average_in_list", "copies_method", "freeze"]

_KEEPS: Final = frozenset("detach clone contiguous cpu cuda to data values items requires_grad_".split())


def copies_method(
    interpreter: Interpreter, node: ast.Call, copies: Parameters, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of weights or of copies of them."""
    dtype = requested_dtype(name, arguments)
    if dtype:
        cast = node if dtype in ("float16", "bfloat16") else None
        return replace(copies, dtype=dtype, cast=cast, is_copy=True)
    if name == "requires_grad_":
        for model in copies.models or ():
            freeze(interpreter, model, arguments.get(0, "requires_grad"))
    if name == "mul_":
        return replace(copies, decayed=True)
    added = name in ("add_", "addcmul_") and copies.decayed
    if added or name == "lerp_" or (name == "copy_" and _averages_itself(node)):
        interpreter.record(WeightsAveraged(interpreter.at(node), copies))
        return copies
    if name in ("detach", "clone"):
        return replace(copies, is_copy=True)
    return copies if name in _KEEPS else UNKNOWN


def freeze(interpreter: Interpreter, model: str, value: Value | None) -> None:
    """Record that the parameters of a model are frozen if a value is false, and trained if it is not."""
    is_frozen = literal_of(value) is False
    interpreter.state.set_fact(FROZEN, True if is_frozen else None, model)


def average_in_list(interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments) -> None:
    """Interpret ``torch._foreach_lerp_`` and the like."""
    averages = item_of(arguments.get(0, "self") or UNKNOWN)
    if name in ("_foreach_lerp_", "_foreach_mul_") and isinstance(averages, Parameters):
        interpreter.record(WeightsAveraged(interpreter.at(node), averages))


def _averages_itself(node: ast.Call) -> bool:
    """Return whether a call is ``x.copy_(decay * x + (1 - decay) * y)``."""
    argument = ast.unparse(node.args[0]) if node.args else ""
    target = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return target in argument and " + " in argument and "1 - " in argument.replace("1.0 - ", "1 - ")
