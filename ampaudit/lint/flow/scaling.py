"""Methods of a gradient scaler: scale, unscale_, step, update; and what each does to the facts."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import removal
from ampaudit.lint.flow.facts import BY_STEP, PAST, YES, contributions, one_optimizer
from ampaudit.lint.flow.protocol import (
    check_bfloat16,
    check_early,
    check_gradients,
    check_order,
    check_parameters,
    check_repeated,
    check_update,
    inside_autocast,
    updates,
    zeroed,
)
from ampaudit.lint.flow.state import EMPTY
from ampaudit.lint.flow.values import (
    MAYBE,
    NO,
    OPAQUE,
    UNKNOWN,
    Bound,
    Function,
    Listed,
    Optimizer,
    Scaler,
    StateOf,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = ["scaler_method"]


def scaler_method(machine: Machine, node: ast.Call, scaler: Scaler, name: str, arguments: Arguments) -> Value:
    """What a method of a gradient scaler does."""
    machine.seen_scaler(scaler)
    if name == "scale":
        return _scale(machine, node, scaler, arguments)
    target = arguments.get(0, "optimizer")
    if name == "step" and isinstance(target, Optimizer):
        _step(machine, node, scaler, target, arguments)
    elif name == "unscale_" and isinstance(target, Optimizer):
        _unscale(machine, node, scaler, target)
    elif name in ("step", "unscale_"):
        machine.note(f"scaler.{name.rstrip('_')}", node, scaler=scaler.key, optimizer="", many=True)
        machine.live.put(MAYBE, "grads")
        for fact in ("unscaled", "stepped", "early"):
            machine.live.forget(fact)
        machine.live.put(MAYBE, "touched")
    elif name == "update":
        _update(machine, node, scaler)
    elif name in ("state_dict", "load_state_dict"):
        machine.note(f"scaler.{name}", node, scaler=scaler.key)
        return StateOf("scaler", scaler.key) if name == "state_dict" else UNKNOWN
    elif name in ("get_scale", "_get_scale_async", "is_enabled"):
        machine.note("scaler.get_scale", node, scaler=scaler.key)
        return UNKNOWN
    return UNKNOWN


def _scale(machine: Machine, node: ast.Call, scaler: Scaler, arguments: Arguments) -> Value:
    value = arguments.get(0, "outputs")
    machine.note("scaler.scale", node, scaler=scaler.key)
    machine.live.put(None, "unused", scaler.key)
    if scaler.enabled is False:
        return value if value is not None else UNKNOWN
    if isinstance(value, Tensor) and value.under == "bfloat16" and scaler.enabled is True:
        check_bfloat16(machine, node, scaler)
    if isinstance(value, Listed):
        return Listed(tuple(_scaled(item, scaler) for item in value.items), value.one)
    return _scaled(value if value is not None else UNKNOWN, scaler)


def _scaled(value: Value, scaler: Scaler) -> Value:
    base = value if isinstance(value, Tensor) else replace(OPAQUE, roots=None)
    return replace(base, scaled=scaler.key if base.scaled in (NO, scaler.key) else MAYBE)


def _step(
    machine: Machine, node: ast.Call, scaler: Scaler, optimizer: Optimizer, arguments: Arguments
) -> None:
    state = machine.live
    machine.note("scaler.step", node, scaler=scaler.key, optimizer=optimizer.key, many=optimizer.many)
    if scaler.enabled is False:
        state.put(EMPTY, "grads")
        return
    closure = arguments.get(1, "closure")
    lambdas = isinstance(arguments.expression(1, "closure"), ast.Lambda)
    if isinstance(closure, Function | Bound) or lambdas or optimizer.cls == "LBFGS":
        machine.say(
            "AMP816",
            node,
            "the scaler cannot step an optimizer that computes the loss again (a closure)",
            "use an optimizer without a closure, or train in bfloat16 or float32 without a scaler",
        )
        state.put(MAYBE, "grads")
        state.put(None, "unused", scaler.key)
        state.put(YES, "stepped", scaler.key, optimizer.key)
        state.put(MAYBE, "updated", scaler.key)
        return
    if scaler.enabled is True:
        check_parameters(machine, optimizer, node)
    check_gradients(machine, scaler, optimizer, node)
    check_order(machine, scaler, node)
    check_repeated(machine, scaler, optimizer, node)
    inside_autocast(machine, node)
    zeroed(machine, optimizer)
    state.put(YES, "stepped", scaler.key, optimizer.key)
    state.put(BY_STEP, "unscaled", scaler.key, optimizer.key)
    state.put(optimizer.key, "last")
    if one_optimizer(machine) and not optimizer.many and contributions(machine) is not None:
        state.put(EMPTY, "grads")  # what is in there now was unscaled
    state.put(None, "early", scaler.key)
    state.put(None, "fresh")


def _unscale(machine: Machine, node: ast.Call, scaler: Scaler, optimizer: Optimizer) -> None:
    state = machine.live
    machine.note("scaler.unscale", node, scaler=scaler.key, optimizer=optimizer.key, many=optimizer.many)
    if scaler.enabled is False:
        return
    first = machine.first_round or updates(machine, scaler)
    if scaler.enabled is True:
        check_parameters(machine, optimizer, node)
    if first and not optimizer.many and state.get("stepped", scaler.key, optimizer.key) == YES:
        machine.say(
            "AMP811",
            node,
            "unscale_() comes after the step of this optimizer, which has unscaled the gradients already",
            "call unscale_() between backward and step",
        )
    elif (
        first and not optimizer.many and isinstance(state.get("unscaled", scaler.key, optimizer.key), ast.AST)
    ):
        machine.say(
            "AMP809",
            node,
            "unscale_() was already called for this optimizer since the last update()",
            "call it once per step",
            removal(machine.statement, node),
        )
    elif not optimizer.many and YES in (state.get("idle"), state.get("unused", scaler.key)):
        machine.say(
            "AMP826",
            node,
            "unscale_() runs before there are gradients of a scaled loss",
            "call it after backward, and before the step",
        )
    check_early(
        machine, f"unscale_() at line {node.lineno}, which then divides by another scale", stepped=False
    )
    state.put(node, "unscaled", scaler.key, optimizer.key)


def _update(machine: Machine, node: ast.Call, scaler: Scaler) -> None:
    state = machine.live
    machine.note("scaler.update", node, scaler=scaler.key)
    if scaler.enabled is False:
        return
    check_update(machine, node, scaler)
    stepped = [fact for _, fact in state.where("stepped", scaler.key) if fact is not None]
    found = contributions(machine)
    own = bool(found) and all(item.scaler == scaler.key for item in found or ())
    fresh = state.get("fresh") == YES and state.get("touched") is None
    if own and fresh:
        looked = state.said("unscaled", scaler.key)
        state.put((node, looked), "early", scaler.key)
        state.put(YES if looked else None, "leftover")
    elif YES in stepped or PAST in stepped:
        known = state.get("updated", scaler.key) != MAYBE
        state.put(node if known else MAYBE, "updated", scaler.key)
        if state.get("fresh") is None:
            state.put(EMPTY, "grads")
        state.put(YES if known else MAYBE, "idle")
    elif stepped:
        state.put(MAYBE, "updated", scaler.key)
        state.put(MAYBE, "grads")
        state.put(MAYBE, "idle")
    state.clear("stepped", scaler.key)
    state.clear("unscaled", scaler.key)
