"""Interprets the methods of a gradient scaler: scale, unscale_, step, update."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import remove_statement
from ampaudit.linter.flow.definitions import BoundMethod, Function
from ampaudit.linter.flow.events import (
    ScaleRead,
    ScalerRestored,
    ScalerSaved,
    ScalerScale,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
    ScaleSet,
)
from ampaudit.linter.flow.facts import (
    FRESH,
    IDLE,
    LEFTOVER,
    PERHAPS,
    STEPPED,
    STEPPED_LAST,
    TOUCHED,
    UNSCALED_AT,
    UNUSED,
    UPDATED,
    UPDATED_EARLY,
    EarlyUpdate,
    Stepped,
)
from ampaudit.linter.flow.gradient_uses import gradient_contributions, has_single_optimizer
from ampaudit.linter.flow.scaler_checks import (
    check_adapters,
    check_bfloat16,
    check_early,
    check_gradients,
    check_order,
    check_paired,
    check_parameters,
    check_repeated,
    check_unscaled_by_another,
    check_update,
    check_zeroed,
    has_update,
)
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, AccumulatedGradients
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    KnownItems,
    Optimizer,
    Scaler,
    ScaleReading,
    StateDict,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["scaler_method"]


def scaler_method(
    interpreter: Interpreter, node: ast.Call, scaler: Scaler, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of a gradient scaler."""
    interpreter.register_scaler(scaler)
    if name == "scale":
        return _scale(interpreter, node, scaler, arguments)
    target = arguments.get(0, "optimizer")
    if name == "step" and isinstance(target, Optimizer):
        _step(interpreter, node, scaler, target, arguments)
    elif name == "unscale_" and isinstance(target, Optimizer):
        _unscale(interpreter, node, scaler, target)
    elif name in ("step", "unscale_"):
        place = interpreter.at(node)
        interpreter.record(
            ScalerStep(place, "", interpreter.autocast, scaler.key)
            if name == "step"
            else ScalerUnscale(place, scaler.key)
        )
        interpreter.state.gradients = UNKNOWN_GRADIENTS
        interpreter.state.invalidate(UNSCALED_AT, STEPPED, UPDATED_EARLY)
        interpreter.state.set_fact(TOUCHED, PERHAPS)
    elif name == "update":
        _update(interpreter, node, scaler)
    elif name == "state_dict":
        interpreter.record(ScalerSaved(interpreter.at(node), scaler.key))
        return StateDict("scaler", scaler.key)
    elif name == "load_state_dict":
        interpreter.record(ScalerRestored(interpreter.at(node), scaler.key))
    elif name in ("get_scale", "_get_scale_async", "is_enabled"):
        interpreter.record(ScaleRead(interpreter.at(node), scaler.key))
        return ScaleReading(scaler.key) if name == "get_scale" else UNKNOWN
    return UNKNOWN


def _scale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, arguments: Arguments) -> Value:
    value = arguments.get(0, "outputs")
    interpreter.record(ScalerScale(interpreter.at(node), scaler.key))
    interpreter.state.set_fact(UNUSED, None, scaler.key)
    if scaler.enabled is False:
        return value if value is not None else UNKNOWN
    if isinstance(value, Tensor) and value.computed_under == "bfloat16" and scaler.enabled is True:
        check_bfloat16(interpreter, node, scaler)
    if isinstance(value, KnownItems):
        return KnownItems(tuple(_scaled_value(item, scaler) for item in value.items), value.repeated)
    return _scaled_value(value if value is not None else UNKNOWN, scaler)


def _scaled_value(value: Value, scaler: Scaler) -> Value:
    base = value if isinstance(value, Tensor) else replace(UNSCALED_TENSOR, model_calls=None)
    return replace(base, scaler_key=scaler.key if base.scaler_key in (UNSCALED, scaler.key) else MAYBE)


def _step(
    interpreter: Interpreter, node: ast.Call, scaler: Scaler, optimizer: Optimizer, arguments: Arguments
) -> None:
    state = interpreter.state
    key = optimizer.key if not optimizer.one_of_several else ""
    interpreter.record(ScalerStep(interpreter.at(node), key, interpreter.autocast, scaler.key))
    if scaler.enabled is False:
        state.gradients = AccumulatedGradients()
        return
    closure = arguments.get(1, "closure")
    lambdas = isinstance(arguments.expression(1, "closure"), ast.Lambda)
    if isinstance(closure, Function | BoundMethod) or lambdas or optimizer.class_name == "LBFGS":
        interpreter.report(
            "AMP816",
            node,
            "the scaler does not support an optimizer that recomputes the loss in a closure",
            "use an optimizer without a closure, or train in bfloat16 or float32 without a scaler",
        )
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(UNUSED, None, scaler.key)
        state.set_fact(STEPPED, Stepped.BY_SCALER, scaler.key, optimizer.key)
        state.set_fact(UPDATED, PERHAPS, scaler.key)
        return
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
        check_adapters(interpreter, node)
    check_gradients(interpreter, scaler, optimizer, node)
    check_paired(interpreter, optimizer, node)
    check_unscaled_by_another(interpreter, scaler, optimizer, node)
    check_order(interpreter, scaler, node)
    check_repeated(interpreter, scaler, optimizer, node)
    check_zeroed(interpreter, optimizer)
    state.set_fact(STEPPED, Stepped.BY_SCALER, scaler.key, optimizer.key)
    state.set_fact(UNSCALED_AT, Stepped.BY_SCALER, scaler.key, optimizer.key)
    state.set_fact(STEPPED_LAST, optimizer.key)
    if (
        has_single_optimizer(interpreter)
        and not optimizer.one_of_several
        and gradient_contributions(interpreter) is not None
    ):
        state.gradients = AccumulatedGradients()  # the step has unscaled the gradients
    state.set_fact(UPDATED_EARLY, None, scaler.key)
    state.set_fact(FRESH, None)


def _unscale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, optimizer: Optimizer) -> None:
    state = interpreter.state
    interpreter.record(ScalerUnscale(interpreter.at(node), scaler.key))
    if scaler.enabled is False:
        return
    first = interpreter.is_first_iteration or has_update(interpreter, scaler)
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
    key = (scaler.key, optimizer.key)
    if first and not optimizer.one_of_several and state.get(STEPPED, *key) is Stepped.BY_SCALER:
        interpreter.report(
            "AMP811",
            node,
            "unscale_() runs after the step of this optimizer, which has already unscaled the gradients",
            "call unscale_() between backward and step",
        )
    elif first and not optimizer.one_of_several and state.known_at(UNSCALED_AT, *key):
        interpreter.report(
            "AMP809",
            node,
            "unscale_() has already been called for this optimizer since the last update()",
            "call it once per step",
            remove_statement(interpreter.statement, node),
        )
    elif not optimizer.one_of_several and True in (state.get(IDLE), state.get(UNUSED, scaler.key)):
        interpreter.report(
            "AMP826",
            node,
            "unscale_() runs before there are gradients of a scaled loss",
            "call it after backward, and before the step",
        )
    check_early(
        interpreter, f"unscale_() at line {node.lineno}, which then divides by another scale", stepped=False
    )
    state.set_fact(UNSCALED_AT, node, scaler.key, optimizer.key)


def _update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    state = interpreter.state
    sets_scale = bool(node.args or node.keywords)  # which needs no step before it
    place = interpreter.at(node)
    interpreter.record(ScaleSet(place, scaler.key) if sets_scale else ScalerUpdate(place, scaler.key))
    if scaler.enabled is False or sets_scale:
        return
    check_update(interpreter, node, scaler)
    stepped = [fact for _, fact in state.matching(STEPPED, scaler.key) if fact is not None]
    contributions = gradient_contributions(interpreter)
    all_by_scaler = bool(contributions) and all(item.scaler == scaler.key for item in contributions or ())
    fresh = state.get(FRESH) is True and state.get(TOUCHED) is None
    if all_by_scaler and fresh:
        looked = state.may_hold(UNSCALED_AT, scaler.key)
        state.set_fact(UPDATED_EARLY, EarlyUpdate(node, looked), scaler.key)
        state.set_fact(LEFTOVER, True if looked else None)
    elif any(isinstance(fact, Stepped) for fact in stepped):
        is_certain = state.get(UPDATED, scaler.key) is not PERHAPS
        state.set_fact(UPDATED, node if is_certain else PERHAPS, scaler.key)
        if state.get(FRESH) is None:
            state.gradients = AccumulatedGradients()
        state.set_fact(IDLE, True if is_certain else PERHAPS)
    elif stepped:
        state.set_fact(UPDATED, PERHAPS, scaler.key)
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(IDLE, PERHAPS)
    state.clear(STEPPED, scaler.key)
    state.clear(UNSCALED_AT, scaler.key)
