"""Backward passes and clipping: what is in ``.grad``, and who reads it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Fix
from ampaudit.lint.flow.blocks import next_step
from ampaudit.lint.flow.facts import BY_STEP, YES, contributions, is_still_scaled, is_unscaled, one_optimizer
from ampaudit.lint.flow.joining import part_of
from ampaudit.lint.flow.protocol import check_early
from ampaudit.lint.flow.state import EMPTY, Contribution
from ampaudit.lint.flow.values import (
    MAYBE,
    NO,
    UNKNOWN,
    Const,
    Gradients,
    Listed,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = ["autograd_grad", "backward", "clip", "unknown_backward"]


def unknown_backward(machine: Machine) -> None:
    """Somebody's own backward: whether it scales the loss is not known."""
    state = machine.live
    state.put(MAYBE, "grads")
    state.clear("updated")
    state.clear("zeroed")
    state.put(None, "last")
    state.put(MAYBE, "idle")
    state.put(MAYBE, "fresh")
    machine.note("backward.unknown", machine.statement or machine.script.tree)


def backward(machine: Machine, node: ast.Call, loss: Tensor, arguments: Arguments) -> Value:
    """``loss.backward()``."""
    state = machine.live
    retain = arguments.get(1, "retain_graph")
    retained = isinstance(retain, Const) and retain.value is True
    machine.note("backward", node, loss=loss, retain=retained, no_sync="no_sync" in machine.grad)
    if machine.autocast.enabled is True and machine.autocast.plain:
        machine.note("backward.inside", node, context=machine.autocast)
    _check_accumulated(machine, node, loss)
    if "create_graph" not in arguments.keywords:
        _check_graph(machine, node, loss, retained or (retain is not None and not isinstance(retain, Const)))
    found = contributions(machine)
    if loss.scaled == MAYBE or found is None:
        state.put(MAYBE, "grads")
    elif loss.scaled != NO or not is_unscaled(machine):
        # what a plain loss adds to gradients that were unscaled is right
        state.put(found | {Contribution(loss.scaled, node, loss.under)}, "grads")
    if loss.scaled != NO:
        check_early(
            machine, f"the backward at line {node.lineno}, whose loss has another scale", stepped=False
        )
    for name in ("updated", "zeroed", "early"):
        state.clear(name)
    state.put(None, "idle")
    state.put(YES, "fresh")
    for key, fact in state.where("unscaled"):
        if fact == BY_STEP:
            state.facts[key] = None  # these gradients are new
    state.put(None, "last")
    return UNKNOWN


def _check_accumulated(machine: Machine, node: ast.Call, loss: Tensor) -> None:
    if loss.scaled in (NO, MAYBE) or not one_optimizer(machine) or contributions(machine) in (None, EMPTY):
        return
    state = machine.live
    unscaled = [fact for _, fact in state.where("unscaled", loss.scaled)]
    stepped = state.said("stepped", loss.scaled)
    if state.get("leftover") == YES:
        unscaled, stepped = [node], False
    if unscaled and all(isinstance(fact, ast.AST) for fact in unscaled) and not stepped:
        machine.say(
            "AMP812",
            node,
            "gradients with the loss scale are added to gradients that were already unscaled",
            "call unscale_() after the last backward before the step",
        )


def _check_graph(machine: Machine, node: ast.Call, loss: Tensor, retained: bool) -> None:
    for root in loss.roots or ():
        freed = machine.live.get("freed", root)
        if isinstance(freed, ast.AST) and freed is not node:
            machine.say(
                "AMP835",
                freed,
                f"this backward frees the graph that the one at line {node.lineno} goes through again",
                "add the losses and call backward once, or pass retain_graph=True to the first",
            )
        if not retained:
            machine.live.put(node, "freed", root)


def clip(machine: Machine, node: ast.Call, name: str, arguments: Arguments) -> Value:
    """``clip_grad_norm_`` and ``clip_grad_value_``, and their relatives."""
    machine.note("clip", node, name=name)
    if is_still_scaled(machine):
        machine.say(
            "AMP807",
            node,
            "the gradients are clipped while they still have the loss scale as a factor",
            "call scaler.unscale_(optimizer) before clipping",
            _unscale_first(machine),
        )
    found = contributions(machine)
    raises = arguments.keywords.get("error_if_nonfinite")
    scaled = bool(found) and any(item.scaler for item in found or ())
    if scaled and isinstance(raises, Const) and raises.value is True:
        machine.say(
            "AMP819",
            node,
            "clipping raises on infinite gradients, which under a loss scale are normal: the scaler skips"
            " such steps",
            "leave error_if_nonfinite out",
            Fix.at(node, "remove keyword", "error_if_nonfinite"),
        )
    return UNKNOWN


def _unscale_first(machine: Machine) -> Fix | None:
    """Before the statement with the clip: what the step that follows in the same block will name."""
    statement = machine.statement
    step = next_step(machine.script, statement)
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign) or step is None:
        return None
    return Fix.at(statement, "insert before", f"{step[0]}.unscale_({step[1]})")


def autograd_grad(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    """``torch.autograd.grad``; with ``create_graph`` its result will be part of a loss."""
    outputs = arguments.get(0, "outputs")
    create = arguments.get(4, "create_graph")
    machine.note("autograd.grad", node)
    if not isinstance(create, Const) or create.value is not True:
        return UNKNOWN
    first = part_of(outputs) if isinstance(outputs, Listed) else outputs
    if isinstance(first, Tensor):
        return Gradients(first.scaled, first.under, node)
    return Gradients(MAYBE, "", node)
