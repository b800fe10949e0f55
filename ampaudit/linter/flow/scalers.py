"""Interprets the methods of a gradient scaler: scale, unscale_, step, update."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import remove_statement
from ampaudit.linter.flow.definitions import BoundMethod, Function
from ampaudit.linter.flow.gradient_facts import (
    BY_STEP,
    BYPASSED,
    YES,
    gradient_contributions,
    has_single_optimizer,
)
from ampaudit.linter.flow.scaler_checks import (
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
    record_step_inside_autocast,
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
    from ampaudit.linter.flow.calls import Arguments
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
        interpreter.record_event(f"scaler.{name.rstrip('_')}", node, scaler=scaler.key, optimizer="")
        interpreter.state.gradients = UNKNOWN_GRADIENTS
        for fact in ("unscaled", "stepped", "early"):
            interpreter.state.invalidate(fact)
        interpreter.state.set_fact(MAYBE, "touched")
    elif name == "update":
        _update(interpreter, node, scaler)
    elif name in ("state_dict", "load_state_dict"):
        interpreter.record_event(f"scaler.{name}", node, scaler=scaler.key)
        return StateDict("scaler", scaler.key) if name == "state_dict" else UNKNOWN
    elif name in ("get_scale", "_get_scale_async", "is_enabled"):
        interpreter.record_event("scaler.get_scale", node, scaler=scaler.key)
        return ScaleReading(scaler.key) if name == "get_scale" else UNKNOWN
    return UNKNOWN


def _scale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, arguments: Arguments) -> Value:
    value = arguments.get(0, "outputs")
    interpreter.record_event("scaler.scale", node, scaler=scaler.key)
    interpreter.state.set_fact(None, "unused", scaler.key)
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
    known = optimizer.key if not optimizer.one_of_several else ""
    interpreter.record_event("scaler.step", node, scaler=scaler.key, optimizer=known)
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
        state.set_fact(None, "unused", scaler.key)
        state.set_fact(YES, "stepped", scaler.key, optimizer.key)
        state.set_fact(MAYBE, "updated", scaler.key)
        return
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
    check_gradients(interpreter, scaler, optimizer, node)
    check_paired(interpreter, optimizer, node)
    check_unscaled_by_another(interpreter, scaler, optimizer, node)
    check_order(interpreter, scaler, node)
    check_repeated(interpreter, scaler, optimizer, node)
    record_step_inside_autocast(interpreter, node)
    check_zeroed(interpreter, optimizer)
    state.set_fact(YES, "stepped", scaler.key, optimizer.key)
    state.set_fact(BY_STEP, "unscaled", scaler.key, optimizer.key)
    state.set_fact(optimizer.key, "last")
    if (
        has_single_optimizer(interpreter)
        and not optimizer.one_of_several
        and gradient_contributions(interpreter) is not None
    ):
        state.gradients = AccumulatedGradients()  # the step has unscaled the gradients
    state.set_fact(None, "early", scaler.key)
    state.set_fact(None, "fresh")


def _unscale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, optimizer: Optimizer) -> None:
    state = interpreter.state
    interpreter.record_event("scaler.unscale", node, scaler=scaler.key)
    if scaler.enabled is False:
        return
    first = interpreter.is_first_iteration or has_update(interpreter, scaler)
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
    if first and not optimizer.one_of_several and state.get("stepped", scaler.key, optimizer.key) == YES:
        interpreter.report(
            "AMP811",
            node,
            "unscale_() runs after the step of this optimizer, which has already unscaled the gradients",
            "call unscale_() between backward and step",
        )
    elif (
        first
        and not optimizer.one_of_several
        and isinstance(state.get("unscaled", scaler.key, optimizer.key), ast.AST)
    ):
        interpreter.report(
            "AMP809",
            node,
            "unscale_() has already been called for this optimizer since the last update()",
            "call it once per step",
            remove_statement(interpreter.statement, node),
        )
    elif not optimizer.one_of_several and YES in (state.get("idle"), state.get("unused", scaler.key)):
        interpreter.report(
            "AMP826",
            node,
            "unscale_() runs before there are gradients of a scaled loss",
            "call it after backward, and before the step",
        )
    check_early(
        interpreter, f"unscale_() at line {node.lineno}, which then divides by another scale", stepped=False
    )
    state.set_fact(node, "unscaled", scaler.key, optimizer.key)


def _update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    state = interpreter.state
    sets_scale = bool(node.args or node.keywords)  # which needs no step before it
    interpreter.record_event("scaler.set" if sets_scale else "scaler.update", node, scaler=scaler.key)
    if scaler.enabled is False or sets_scale:
        return
    check_update(interpreter, node, scaler)
    stepped = [fact for _, fact in state.matching("stepped", scaler.key) if fact is not None]
    found = gradient_contributions(interpreter)
    own = bool(found) and all(item.scaler == scaler.key for item in found or ())
    fresh = state.get("fresh") == YES and state.get("touched") is None
    if own and fresh:
        looked = state.may_hold("unscaled", scaler.key)
        state.set_fact((node, looked), "early", scaler.key)
        state.set_fact(YES if looked else None, "leftover")
    elif YES in stepped or BYPASSED in stepped:
        known = state.get("updated", scaler.key) != MAYBE
        state.set_fact(node if known else MAYBE, "updated", scaler.key)
        if state.get("fresh") is None:
            state.gradients = AccumulatedGradients()
        state.set_fact(YES if known else MAYBE, "idle")
    elif stepped:
        state.set_fact(MAYBE, "updated", scaler.key)
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(MAYBE, "idle")
    state.clear("stepped", scaler.key)
    state.clear("unscaled", scaler.key)
