"""Interprets the methods of a gradient scaler: scale, unscale_, step, update."""

from __future__ import annotations

import ast
from dataclasses import replace

from ampaudit.linter.flow.events import (
    ScalerRestored,
    ScalerSaved,
    ScalerScale,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
)
from ampaudit.linter.flow.gradients import has_single_optimizer
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import (
    PERHAPS,
    STAGE,
    UNKNOWN_GRADIENTS,
    UNUSED,
    AccumulatedGradients,
    Life,
    Phase,
    Stage,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    Arguments,
    BoundMethod,
    Function,
    KnownItems,
    Optimizer,
    Scaler,
    ScaleReading,
    StateDict,
    Tensor,
    Value,
)

__all__ = ["scaler_method"]


def scaler_method(
    interpreter: Interpreter, node: ast.Call, scaler: Scaler, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of a gradient scaler."""
    interpreter.register_scaler(scaler)
    place = interpreter.at(node)
    if name == "scale":
        outputs = arguments.get(0, "outputs")
        interpreter.record(ScalerScale(place, scaler, outputs))
        interpreter.state.set_fact(UNUSED, None, scaler.key)
        return _scaled(outputs or UNKNOWN, scaler)
    if name == "step":
        _step(interpreter, node, scaler, arguments)
    elif name == "unscale_":
        _unscale(interpreter, node, scaler, arguments.get(0, "optimizer"))
    elif name == "update" and not arguments.all():  # a new scale needs no step before it
        interpreter.record(ScalerUpdate(place, scaler))
        if scaler.enabled is not False:
            _update(interpreter, node, scaler)
    elif name == "state_dict":
        interpreter.record(ScalerSaved(place, scaler))
        return StateDict("scaler", scaler.key)
    elif name == "load_state_dict":
        interpreter.record(ScalerRestored(place, scaler))
    return ScaleReading(scaler.key) if name == "get_scale" else UNKNOWN


def _scaled(value: Value, scaler: Scaler) -> Value:
    if scaler.enabled is False:
        return value
    if isinstance(value, KnownItems):
        return replace(value, items=tuple(_scaled(item, scaler) for item in value.items))
    base = value if isinstance(value, Tensor) else replace(UNSCALED_TENSOR, model_calls=None)
    return replace(base, scaler_key=scaler.key if base.scaler_key in (UNSCALED, scaler.key) else MAYBE)


def _step(interpreter: Interpreter, node: ast.Call, scaler: Scaler, arguments: Arguments) -> None:
    state, target = interpreter.state, arguments.get(0, "optimizer")
    optimizer = target if isinstance(target, Optimizer) else None
    has_closure = (
        isinstance(arguments.get(1, "closure"), Function | BoundMethod)
        or isinstance(arguments.expression(1, "closure"), ast.Lambda)
        or (optimizer is not None and optimizer.class_name == "LBFGS")
    )
    if scaler.enabled is not False and has_closure:  # which runs backward
        state.assume_any_step()
    interpreter.record(ScalerStep(interpreter.at(node), optimizer, interpreter.autocast, scaler, has_closure))
    if optimizer is None:
        state.assume_any_step()
    elif scaler.enabled is False:
        state.gradients = AccumulatedGradients()
    else:
        state.set_fact(STAGE, Stage.STEPPED, scaler.key, optimizer.key)
        state.reach(Phase.STEPPED, stepped=optimizer.key)
        is_alone = has_single_optimizer(interpreter) and not optimizer.one_of_several
        if is_alone and state.gradients.known is not None:
            state.gradients = AccumulatedGradients()  # the step has unscaled the gradients


def _unscale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, target: Value | None) -> None:
    state, optimizer = interpreter.state, target if isinstance(target, Optimizer) else None
    interpreter.record(ScalerUnscale(interpreter.at(node), scaler, optimizer))
    if optimizer is None:
        state.assume_any_step()
    elif scaler.enabled is not False and state.get(STAGE, scaler.key, optimizer.key) is not Stage.STEPPED:
        state.set_fact(STAGE, Stage.UNSCALED, scaler.key, optimizer.key)


def _update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    state, stages = interpreter.state, set(interpreter.state.stages(scaler.key))
    contributions = state.gradients.known
    all_by_scaler = bool(contributions) and all(item.scaler == scaler.key for item in contributions or ())
    if state.life.phase in (Phase.FRESH, Phase.EARLY, Phase.LOOKED) and all_by_scaler:
        state.reach(Phase.LOOKED if stages - {Stage.RENEWED} else Phase.EARLY, node, scaler.key)
    elif stages & {Stage.STEPPED, Stage.RENEWED} or state.life.phase is Phase.BYPASSED:
        if state.life.phase in (Phase.STEPPED, Phase.BYPASSED):
            state.gradients = AccumulatedGradients()
        state.reach(Phase.UPDATED, node, scaler.key)
    elif PERHAPS in stages:
        state.gradients = UNKNOWN_GRADIENTS
        state.life = Life()
    state.clear(STAGE, scaler.key)
