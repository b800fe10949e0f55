"""What may be wrong with the order in which a gradient scaler is used."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Fix
from ampaudit.lint.flow.gradient_facts import YES, gradient_contributions, has_single_optimizer
from ampaudit.lint.flow.script import dotted_name
from ampaudit.lint.flow.state import NO_CONTRIBUTIONS, Contribution
from ampaudit.lint.flow.statement_context import in_same_function
from ampaudit.lint.flow.values import Optimizer, Scaler

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

__all__ = [
    "check_bfloat16",
    "check_early",
    "check_gradients",
    "check_order",
    "check_parameters",
    "check_repeated",
    "check_update",
    "check_zeroed",
    "has_update",
    "record_step_inside_autocast",
]


def check_bfloat16(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    """bfloat16 gradients need no scale."""
    place = scaler.node if scaler.node is not None else node
    fix = None
    if isinstance(place, ast.Call) and not any(k.arg in ("enabled", None) for k in place.keywords):
        fix = Fix.at(place, "set keyword", "enabled", "False")
    interpreter.report(
        "AMP818",
        place,
        "the loss is computed in bfloat16, whose range is float32's: its gradients need no loss scale",
        "leave the scaler out, or make it with enabled=False",
        fix,
    )


def check_parameters(interpreter: Interpreter, optimizer: Optimizer, node: ast.Call) -> None:
    """A scaler refuses gradients in float16, which parameters in float16 have."""
    for model in optimizer.models or ():
        halved = interpreter.state.get("half", model)
        if isinstance(halved, ast.AST):
            interpreter.report(
                "AMP801",
                halved,
                f"these parameters are float16, and the scaler at line {node.lineno} cannot unscale float16"
                " gradients",
                "leave the parameters in float32 and let autocast choose the dtype of each op",
            )


def check_gradients(interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, step: ast.Call) -> None:
    """What is in the gradients that the scaler is about to divide."""
    found = gradient_contributions(interpreter)
    if not found:
        return
    others = {item.scaler for item in found} - {scaler.key, ""}
    if others and has_single_optimizer(interpreter) and not optimizer.one_of_several:
        odd = next(item for item in found if item.scaler in others)
        interpreter.report(
            "AMP815",
            odd.node,
            "this loss has another scaler's scale than the others that go into the same gradients",
            "use one scaler for every loss of an optimizer",
        )
    for item in found:
        if not item.scaler and (
            has_single_optimizer(interpreter) or not any(other.scaler for other in found)
        ):
            _report_unscaled_loss(interpreter, step, item)


def _report_unscaled_loss(interpreter: Interpreter, step: ast.Call, item: Contribution) -> None:
    node = item.node
    fix = None
    near = in_same_function(interpreter.script, step, node) and isinstance(step.func, ast.Attribute)
    text = dotted_name(step.func.value) if near and isinstance(step.func, ast.Attribute) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and text:
        receiver = node.func.value
        if isinstance(receiver, ast.Name | ast.Attribute):
            fix = Fix.at(node, "scale loss", text)
    interpreter.report(
        "AMP802",
        node,
        "backward runs on the loss without its scale, but the scaler divides the gradients by the scale",
        f"write {text or 'scaler'}.scale(loss).backward()",
        fix,
    )


def check_order(interpreter: Interpreter, scaler: Scaler, node: ast.Call) -> None:
    """No update came too early for this step."""
    state = interpreter.state
    check_early(
        interpreter, f"the step at line {node.lineno}, which then divides by another scale", stepped=True
    )
    updated = state.get("updated", scaler.key)
    if isinstance(updated, ast.AST):
        interpreter.report(
            "AMP806",
            updated,
            "update() runs between the steps of several optimizers, whose gradients were scaled by the same"
            " scale",
            "call update() once, after the steps of all optimizers",
        )


def check_early(interpreter: Interpreter, what: str, *, stepped: bool) -> None:
    """An update came between the first scaled backward and the step.

    Without a step it is right after unscale_(), which looks for overflow: the script may skip the step.
    """
    for _, early in interpreter.state.matching("early"):
        if isinstance(early, tuple) and (stepped or not early[1]):
            interpreter.report(
                "AMP805",
                early[0],
                f"update() runs before {what}",
                "call update() once per iteration, after every step",
            )


def check_repeated(interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, node: ast.Call) -> None:
    """The scaler has not stepped this optimizer already, and something was scaled."""
    if (
        interpreter.state.get("unused", scaler.key) == YES
        and gradient_contributions(interpreter) == NO_CONTRIBUTIONS
    ):
        interpreter.report(
            "AMP826",
            node,
            "step() runs before anything was scaled",
            "call it after the backward of a scaled loss",
        )
    stepped = interpreter.state.get("stepped", scaler.key, optimizer.key) == YES
    if (
        stepped
        and not optimizer.one_of_several
        and (interpreter.is_first_iteration or has_update(interpreter, scaler))
    ):
        interpreter.report(
            "AMP824",
            node,
            "the scaler has stepped this optimizer already since the last update()",
            "step each optimizer once, then call update()",
        )


def has_update(interpreter: Interpreter, scaler: Scaler) -> bool:
    """Whether there is an update at all; where there is none, that is the mistake."""
    return any(
        e.kind == "scaler.update" and e.data["scaler"] == scaler.key for e in interpreter.events.values()
    )


def check_update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    """There is something to update after."""
    state = interpreter.state
    stepped = state.may_hold("stepped", scaler.key)
    looked = state.may_hold("unscaled", scaler.key)
    again = isinstance(state.get("updated", scaler.key), ast.AST) and not stepped and not looked
    if again or (state.get("unused", scaler.key) == YES and not stepped):
        interpreter.report(
            "AMP825",
            node,
            "update() runs although nothing was stepped since the last one"
            if again
            else "update() runs before anything was scaled",
            "call it once per iteration, after the steps",
        )


def record_step_inside_autocast(interpreter: Interpreter, node: ast.Call) -> None:
    """A step belongs outside of autocast."""
    autocast = interpreter.autocast
    if autocast.enabled is True and autocast.explicit:
        interpreter.record_event("step.inside", node, context=autocast)


def check_zeroed(interpreter: Interpreter, optimizer: Optimizer) -> None:
    """A step whose gradients were just set to zero does nothing."""
    fact = interpreter.state.get("zeroed")
    if isinstance(fact, tuple) and fact[0] == optimizer.key and not optimizer.one_of_several:
        interpreter.report(
            "AMP832",
            fact[1],
            "the gradients are set to zero after backward and before the step that should use them",
            "call zero_grad() before backward or after the step",
        )
