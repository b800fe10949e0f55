"""The protocol of a gradient scaler: scale, backward, unscale_, step, update, in this order.

Facts of the state: ``grads`` is the set of backward passes in ``.grad``; ``unscaled`` and ``stepped`` say per
scaler and optimizer what was done since the last update; ``updated`` is the update since which nothing was
backpropagated; ``early`` an update that came before the step.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from ampaudit.lint.blocks import same_function
from ampaudit.lint.found import Repair
from ampaudit.lint.script import dotted
from ampaudit.lint.state import EMPTY, Contribution
from ampaudit.lint.values import (
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
    from ampaudit.lint.calls import Arguments
    from ampaudit.lint.machine import Machine

__all__ = [
    "BY_STEP",
    "PAST",
    "YES",
    "check_early",
    "contributions",
    "inside_autocast",
    "is_still_scaled",
    "one_optimizer",
    "scaler_method",
    "zeroed",
]

YES = "yes"
PAST = "past the scaler"
BY_STEP = "by step"


def contributions(machine: Machine) -> frozenset[Contribution] | None:
    """The backward passes in ``.grad``; ``None`` where that is not certain."""
    found = machine.live.get("grads")
    if found is None:
        return EMPTY
    return found if isinstance(found, frozenset) else None


def is_still_scaled(machine: Machine) -> bool:
    """Whether the gradients certainly have a loss scale in them that nothing has taken out."""
    found = contributions(machine)
    if not found or not all(item.scaler for item in found):
        return False
    return not any(fact is not None for _, fact in machine.live.where("unscaled"))


def one_optimizer(machine: Machine) -> bool:
    """Whether it is certain which optimizer's gradients are meant."""
    return len(machine.script.ducks.optimizer_names()) <= 1


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
        _bfloat16(machine, node, scaler)
    if isinstance(value, Listed):
        return Listed(tuple(_scaled(item, scaler) for item in value.items), value.one)
    return _scaled(value if value is not None else UNKNOWN, scaler)


def _scaled(value: Value, scaler: Scaler) -> Value:
    base = value if isinstance(value, Tensor) else replace(OPAQUE, roots=None)
    return replace(base, scaled=scaler.key if base.scaled in (NO, scaler.key) else MAYBE)


def _bfloat16(machine: Machine, node: ast.Call, scaler: Scaler) -> None:
    place = scaler.node if scaler.node is not None else node
    repair = None
    if isinstance(place, ast.Call) and not any(k.arg in ("enabled", None) for k in place.keywords):
        repair = Repair("set keyword", place.lineno, place.col_offset, ("enabled", "False"))
    machine.say(
        "AMP818",
        place,
        "the loss is computed in bfloat16, whose range is float32's: its gradients need no loss scale",
        "leave the scaler out, or make it with enabled=False",
        repair,
    )


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
    _check_gradients(machine, scaler, optimizer, node)
    _check_order(machine, scaler, node)
    _check_repeated(machine, scaler, optimizer, node)
    inside_autocast(machine, node)
    zeroed(machine, optimizer)
    state.put(YES, "stepped", scaler.key, optimizer.key)
    state.put(BY_STEP, "unscaled", scaler.key, optimizer.key)
    state.put(optimizer.key, "last")
    if one_optimizer(machine) and not optimizer.many and contributions(machine) is not None:
        state.put(EMPTY, "grads")  # what is in there now was unscaled
    state.put(None, "early", scaler.key)
    state.put(None, "fresh")


def check_parameters(machine: Machine, optimizer: Optimizer, node: ast.Call) -> None:
    """A scaler refuses gradients in float16, which parameters in float16 have."""
    for model in optimizer.models or ():
        halved = machine.live.get("half", model)
        if isinstance(halved, ast.AST):
            machine.say(
                "AMP801",
                halved,
                f"these parameters are float16, and the scaler at line {node.lineno} cannot unscale float16"
                " gradients",
                "leave the parameters in float32 and let autocast choose the dtype of each op",
            )


def _check_gradients(machine: Machine, scaler: Scaler, optimizer: Optimizer, step: ast.Call) -> None:
    found = contributions(machine)
    if not found:
        return
    others = {item.scaler for item in found} - {scaler.key, ""}
    if others and one_optimizer(machine) and not optimizer.many:
        odd = next(item for item in found if item.scaler in others)
        machine.say(
            "AMP815",
            odd.node,
            "this loss has another scaler's scale than the others that go into the same gradients",
            "use one scaler for every loss of an optimizer",
        )
    for item in found:
        if not item.scaler and (one_optimizer(machine) or not any(other.scaler for other in found)):
            _unscaled_loss(machine, step, item)


def _unscaled_loss(machine: Machine, step: ast.Call, item: Contribution) -> None:
    node = item.node
    repair = None
    near = same_function(machine.script, step, node) and isinstance(step.func, ast.Attribute)
    text = dotted(step.func.value) if near and isinstance(step.func, ast.Attribute) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and text:
        receiver = node.func.value
        if isinstance(receiver, ast.Name | ast.Attribute):
            repair = Repair("scale loss", node.lineno, node.col_offset, (text,))
    machine.say(
        "AMP802",
        node,
        "backward runs on the loss without its scale, but the scaler divides the gradients by the scale",
        f"write {text or 'scaler'}.scale(loss).backward()",
        repair,
    )


def _check_order(machine: Machine, scaler: Scaler, node: ast.Call) -> None:
    state = machine.live
    check_early(machine, f"the step at line {node.lineno}, which then divides by another scale", stepped=True)
    updated = state.get("updated", scaler.key)
    if isinstance(updated, ast.AST):
        machine.say(
            "AMP806",
            updated,
            "update() runs between the steps of several optimizers, whose gradients were scaled by the same"
            " scale",
            "call update() once, after the steps of all optimizers",
        )


def check_early(machine: Machine, what: str, *, stepped: bool) -> None:
    """An update came between the first scaled backward and the step.

    Without a step it is right after unscale_(), which looks for overflow: the script may skip the step.
    """
    for _, early in machine.live.where("early"):
        if isinstance(early, tuple) and (stepped or not early[1]):
            machine.say(
                "AMP805",
                early[0],
                f"update() runs before {what}",
                "call update() once per iteration, after every step",
            )


def _check_repeated(machine: Machine, scaler: Scaler, optimizer: Optimizer, node: ast.Call) -> None:
    if machine.live.get("unused", scaler.key) == YES and contributions(machine) == EMPTY:
        machine.say(
            "AMP826",
            node,
            "step() runs before anything was scaled",
            "call it after the backward of a scaled loss",
        )
    stepped = machine.live.get("stepped", scaler.key, optimizer.key) == YES
    if stepped and not optimizer.many and (machine.first_round or _updates(machine, scaler)):
        machine.say(
            "AMP824",
            node,
            "the scaler has stepped this optimizer already since the last update()",
            "step each optimizer once, then call update()",
        )


def _updates(machine: Machine, scaler: Scaler) -> bool:
    """Whether there is an update at all; where there is none, that is the mistake."""
    return any(e.kind == "scaler.update" and e.data["scaler"] == scaler.key for e in machine.events.values())


def _unscale(machine: Machine, node: ast.Call, scaler: Scaler, optimizer: Optimizer) -> None:
    state = machine.live
    machine.note("scaler.unscale", node, scaler=scaler.key, optimizer=optimizer.key, many=optimizer.many)
    if scaler.enabled is False:
        return
    first = machine.first_round or _updates(machine, scaler)
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
        repair = None
        if isinstance(machine.statement, ast.Expr) and machine.statement.value is node:
            repair = Repair("remove statement", node.lineno, node.col_offset)
        machine.say(
            "AMP809",
            node,
            "unscale_() was already called for this optimizer since the last update()",
            "call it once per step",
            repair,
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
    _check_update(machine, node, scaler)
    stepped = [fact for _, fact in state.where("stepped", scaler.key) if fact is not None]
    found = contributions(machine)
    own = bool(found) and all(item.scaler == scaler.key for item in found or ())
    fresh = state.get("fresh") == YES and state.get("touched") is None
    if own and fresh and not _tested(machine, scaler):
        looked = any(fact is not None for _, fact in state.where("unscaled", scaler.key))
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


def _tested(machine: Machine, scaler: Scaler) -> bool:
    """Whether an optimizer was stepped after unscale_(), past the scaler."""
    past = any(fact is not None for _, fact in machine.live.where("stepped", scaler.key))
    return past and any(fact is not None for _, fact in machine.live.where("unscaled", scaler.key))


def _check_update(machine: Machine, node: ast.Call, scaler: Scaler) -> None:
    state = machine.live
    stepped = any(fact is not None for _, fact in state.where("stepped", scaler.key))
    looked = any(fact is not None for _, fact in state.where("unscaled", scaler.key))
    again = isinstance(state.get("updated", scaler.key), ast.AST) and not stepped and not looked
    if again or (state.get("unused", scaler.key) == YES and not stepped):
        machine.say(
            "AMP825",
            node,
            "update() runs although nothing was stepped since the last one"
            if again
            else "update() runs before anything was scaled",
            "call it once per iteration, after the steps",
        )


def inside_autocast(machine: Machine, node: ast.Call) -> None:
    """A step belongs outside of autocast."""
    here = machine.autocast
    if here.enabled is True and here.plain:
        machine.note("step.inside", node, context=here)


def zeroed(machine: Machine, optimizer: Optimizer) -> None:
    """A step whose gradients were just set to zero does nothing."""
    fact = machine.live.get("zeroed")
    if isinstance(fact, tuple) and fact[0] == optimizer.key and not optimizer.many:
        machine.say(
            "AMP832",
            fact[1],
            "the gradients are set to zero after backward and before the step that should use them",
            "call zero_grad() before backward or after the step",
        )
