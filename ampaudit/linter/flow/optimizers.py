"""Interprets optimizers and what they train: steps, zero_grad, weights and copies of them."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from ampaudit.linter.diagnostic import key_of
from ampaudit.linter.flow.events import OptimizerMade, OptimizerRestored, OptimizerStep, WeightsAveraged
from ampaudit.linter.flow.gradients import zero_gradients
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import FROZEN, UNKNOWN_GRADIENTS, Phase, item_of
from ampaudit.linter.flow.tensors import requested_dtype
from ampaudit.linter.flow.values import (
    UNKNOWN,
    Arguments,
    DictLiteral,
    KnownItems,
    Model,
    Optimizer,
    Parameters,
    StateDict,
    Value,
    literal_of,
)

__all__ = [
    "copies_method",
    "freeze",
    "optimizer_method",
    "optimizer_value",
]


def optimizer_method(
    interpreter: Interpreter, node: ast.Call, optimizer: Optimizer, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of an optimizer."""
    state = interpreter.state
    if name == "step":
        if arguments.all():  # a closure runs backward
            state.gradients = UNKNOWN_GRADIENTS
            state.reach(Phase.FRESH)
        interpreter.record(OptimizerStep(interpreter.at(node), optimizer, interpreter.autocast))
        state.reach(Phase.BYPASSED)
    elif name == "zero_grad":
        zero_gradients(interpreter, node, optimizer.key)
    elif name == "state_dict":
        return StateDict("optimizer", optimizer.key)
    elif name == "load_state_dict" and not isinstance(arguments.get(0, "state_dict"), StateDict):
        interpreter.record(OptimizerRestored(interpreter.at(node)))  # from another run
    return UNKNOWN


def optimizer_value(interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments) -> Optimizer:
    """Interpret the construction of an optimizer; the name is empty for classes of other packages."""
    parameters = arguments.get(0, "params")
    if isinstance(parameters, KnownItems):
        groups = (g.item("params") if isinstance(g, DictLiteral) else g for g in parameters.items)
        parameters = item_of(
            KnownItems(tuple(item_of(g) if isinstance(g, KnownItems) else g or UNKNOWN for g in groups))
        )
    models = parameters.models if isinstance(parameters, Parameters) and not parameters.is_copy else None
    if isinstance(parameters, Model):  # of which timm takes the parameters
        models = frozenset({parameters.key})
    optimizer = Optimizer(key_of(node) + interpreter.call_path, node, name, models)
    interpreter.record(OptimizerMade(interpreter.at(node), optimizer, arguments))
    if models:
        interpreter.models_by_optimizer[optimizer.key] = models
    return optimizer


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


def _averages_itself(node: ast.Call) -> bool:
    """Return whether a call is ``x.copy_(decay * x + (1 - decay) * y)``."""
    argument = ast.unparse(node.args[0]) if node.args else ""
    target = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return target in argument and " + " in argument and "1 - " in argument.replace("1.0 - ", "1 - ")
