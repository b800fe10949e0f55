"""Backward passes, optimizers, clipping: what is in ``.grad`` and who reads it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.lint.blocks import next_step, scaler_near
from ampaudit.lint.found import Repair
from ampaudit.lint.names import ADAM_LIKE, MANAGERS, SMALLEST_HALF
from ampaudit.lint.scaling import (
    BY_STEP,
    PAST,
    YES,
    check_early,
    contributions,
    inside_autocast,
    is_still_scaled,
    one_optimizer,
    zeroed,
)
from ampaudit.lint.state import EMPTY, Contribution
from ampaudit.lint.values import (
    MAYBE,
    NO,
    UNKNOWN,
    Const,
    Gradients,
    Listed,
    Optimizer,
    Params,
    StateOf,
    Tensor,
    Value,
    part_of,
)

if TYPE_CHECKING:
    from ampaudit.lint.calls import Arguments
    from ampaudit.lint.machine import Machine

__all__ = ["autograd_grad", "backward", "clip", "made_optimizer", "optimizer_method", "unknown_backward"]


_TESTS = re.compile(r"isfinite|isinf|isnan|found_inf|check_inf|overflow")
_MENTIONS = re.compile(r"GradScaler|loss_?scal|grad_?scal|NativeScaler|\bscaler\b", re.IGNORECASE)


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
    elif loss.scaled != NO or not _is_unscaled(machine):
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


def _is_unscaled(machine: Machine) -> bool:
    facts = [fact for _, fact in machine.live.where("unscaled")]
    return bool(facts) and all(isinstance(fact, ast.AST) for fact in facts)


def _check_accumulated(machine: Machine, node: ast.Call, loss: Tensor) -> None:
    if loss.scaled in (NO, MAYBE) or not one_optimizer(machine) or contributions(machine) in (None, EMPTY):
        return
    state = machine.live
    unscaled = [fact for _, fact in state.where("unscaled", loss.scaled)]
    stepped = any(fact is not None for _, fact in state.where("stepped", loss.scaled))
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


def optimizer_method(
    machine: Machine, node: ast.Call, optimizer: Optimizer, name: str, arguments: Arguments
) -> Value:
    """What a method of an optimizer does."""
    machine.optimizers.add(optimizer.key)
    state = machine.live
    if name == "step":
        _step(machine, node, optimizer, arguments)
    elif name == "zero_grad":
        machine.note("zero_grad", node, optimizer=optimizer.key, many=optimizer.many)
        if contributions(machine) and one_optimizer(machine) and not _has_stepped(machine):
            state.put((optimizer.key, node), "zeroed")
        state.put(EMPTY, "grads")
        state.put(YES, "idle")
        state.put(None, "leftover")
    elif name in ("state_dict", "load_state_dict"):
        machine.note(f"optimizer.{name}", node, optimizer=optimizer.key)
        return StateOf("optimizer", optimizer.key) if name == "state_dict" else UNKNOWN
    return UNKNOWN


def _has_stepped(machine: Machine) -> bool:
    return any(fact is not None for _, fact in machine.live.where("stepped"))


def _step(machine: Machine, node: ast.Call, optimizer: Optimizer, arguments: Arguments) -> None:
    state = machine.live
    machine.note("optimizer.step", node, optimizer=optimizer.key, many=optimizer.many)
    if arguments.all():  # a closure runs backward in there
        state.put(MAYBE, "grads")
        return
    inside_autocast(machine, node)
    zeroed(machine, optimizer)
    found = contributions(machine)
    if state.get("last") == optimizer.key and not optimizer.many:
        machine.say(
            "AMP817",
            node,
            "the scaler has stepped this optimizer already; this second step does not skip overflow",
            "remove this line: scaler.step(optimizer) calls optimizer.step()",
            _removal(machine, node),
        )
    elif found and _has_scale(machine, found) and (one_optimizer(machine) or len(found) == 1):
        _stepped_past(
            machine,
            node,
            "the optimizer steps with gradients that have the loss scale as a factor, and nothing skips the"
            " step if they overflow",
        )
    elif found and not any(item.scaler for item in found):
        _check_scaling(machine, found)
    elif found and one_optimizer(machine) and _nothing_looks(machine):
        _stepped_past(
            machine,
            node,
            "the optimizer steps past the scaler: nothing skips the step if the gradients overflowed",
        )
    for key in machine.scalers:
        # an own test for overflow stands before it; or the mistake was just reported
        if any(isinstance(fact, ast.AST) for _, fact in state.where("unscaled", key)) or _is_of(found, key):
            state.put(PAST, "stepped", key, optimizer.key)
    state.put(None, "fresh")


def _stepped_past(machine: Machine, node: ast.Call, cause: str) -> None:
    scaler = scaler_near(machine.script, node)
    optimizer = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else "optimizer"
    repair = Repair("step by scaler", node.lineno, node.col_offset, (scaler,)) if scaler else None
    machine.say("AMP803", node, cause, f"write {scaler or 'scaler'}.step({optimizer})", repair)


def _is_of(found: frozenset[Contribution] | None, key: str) -> bool:
    return any(item.scaler == key for item in found or ())


def _has_scale(machine: Machine, found: frozenset[Contribution]) -> bool:
    """Whether the scale is a factor of a part of the gradients at least, and nothing took it out."""
    untouched = not any(fact is not None for _, fact in machine.live.where("unscaled"))
    return untouched and any(item.scaler for item in found)


def _nothing_looks(machine: Machine) -> bool:
    """Whether gradients were unscaled, and the script has no test of its own for what is not finite."""
    for _, fact in machine.live.where("unscaled"):
        if not isinstance(fact, ast.AST):
            return False
    unscaled = [e for e in machine.events.values() if e.kind == "scaler.unscale"]
    inner = len(machine.guards) > min((len(e.guards) for e in unscaled), default=0)
    return bool(unscaled) and not inner and _TESTS.search(machine.script.text) is None


def _removal(machine: Machine, node: ast.Call) -> Repair | None:
    statement = machine.statement
    alone = isinstance(statement, ast.Expr) and statement.value is node
    return Repair("remove statement", node.lineno, node.col_offset) if alone else None


def _check_scaling(machine: Machine, found: frozenset[Contribution]) -> None:
    managed = any(name.startswith(MANAGERS) for name in machine.script.imports)
    if _MENTIONS.search(machine.script.text) or managed or machine.managed:
        return
    for item in found:
        if item.under == "float16":
            machine.say(
                "AMP813",
                item.node,
                "the loss is computed under float16 autocast, and its gradients have no loss scale: small"
                " ones become zero",
                'scale the loss with torch.amp.GradScaler("cuda"), or use dtype=torch.bfloat16',
            )


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
            Repair("remove keyword", node.lineno, node.col_offset, ("error_if_nonfinite",)),
        )
    return UNKNOWN


def _unscale_first(machine: Machine) -> Repair | None:
    """Before the statement with the clip: what the step that follows in the same block will name."""
    statement = machine.statement
    step = next_step(machine.script, statement)
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign) or step is None:
        return None
    return Repair(
        "insert before", statement.lineno, statement.col_offset, (f"{step[0]}.unscale_({step[1]})",)
    )


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


def made_optimizer(machine: Machine, node: ast.Call, name: str, arguments: Arguments) -> Optimizer:
    """``torch.optim.X(...)``."""
    given = arguments.get(0, "params")
    models = given.models if isinstance(given, Params) else None
    key = f"L{node.lineno}:{node.col_offset}"
    machine.optimizers.add(key)
    machine.note("optimizer.made", node, optimizer=key)
    if name in ADAM_LIKE and models:
        _check_eps(machine, node, name, arguments, models)
    return Optimizer(key, node, name, models)


def _check_eps(
    machine: Machine, node: ast.Call, name: str, arguments: Arguments, models: frozenset[str]
) -> None:
    given = arguments.keywords.get("eps", Const(ADAM_LIKE[name]))
    eps = given.value if isinstance(given, Const) else None
    halved = any(isinstance(machine.live.get("half", model), ast.AST) for model in models)
    if halved and isinstance(eps, int | float) and eps <= SMALLEST_HALF:
        machine.say(
            "AMP862",
            node,
            f"eps={eps:g} is zero in float16, the dtype of these parameters and of the optimizer's state:"
            " where a gradient is zero, the update is 0/0",
            "keep the parameters in float32; if they must be float16, use eps=1e-4 or so",
        )
