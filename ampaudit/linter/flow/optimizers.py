"""Interprets optimizers: construction, step, zero_grad."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import key_of
from ampaudit.linter.flow.events import OptimizerMade, OptimizerRestored, OptimizerStep
from ampaudit.linter.flow.facts import Phase
from ampaudit.linter.flow.gradients import zero_gradients
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, item_of
from ampaudit.linter.flow.values import (
    UNKNOWN,
    DictLiteral,
    KnownItems,
    Model,
    Optimizer,
    Parameters,
    StateDict,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["optimizer_method", "optimizer_value"]


def optimizer_method(
    interpreter: Interpreter, node: ast.Call, optimizer: Optimizer, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of an optimizer."""
    if name == "step":
        _step(interpreter, node, optimizer, arguments)
    elif name == "zero_grad":
        zero_gradients(interpreter, node, optimizer.key)
    elif name == "state_dict":
        return StateDict("optimizer", optimizer.key)
    elif name == "load_state_dict" and not isinstance(arguments.get(0, "state_dict"), StateDict):
        interpreter.record(OptimizerRestored(interpreter.at(node)))  # from another run
    return UNKNOWN


def _step(interpreter: Interpreter, node: ast.Call, optimizer: Optimizer, arguments: Arguments) -> None:
    state = interpreter.state
    if arguments.all():  # a closure runs backward
        state.gradients = UNKNOWN_GRADIENTS
        state.reach(Phase.FRESH)
    interpreter.record(OptimizerStep(interpreter.at(node), optimizer, interpreter.autocast))
    state.reach(Phase.BYPASSED)


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
