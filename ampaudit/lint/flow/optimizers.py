"""Optimizers: how they are made, what they step with, what they set to zero."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Fix, removal
from ampaudit.lint.flow.blocks import scaler_near
from ampaudit.lint.flow.facts import PAST, contributions, is_unscaled, no_gradients, one_optimizer
from ampaudit.lint.flow.names import ADAM_LIKE, MANAGERS, SMALLEST_HALF
from ampaudit.lint.flow.protocol import inside_autocast, zeroed
from ampaudit.lint.flow.state import Contribution
from ampaudit.lint.flow.values import MAYBE, UNKNOWN, Const, Optimizer, Params, StateOf, Value

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = ["made_optimizer", "optimizer_method"]


_TESTS = re.compile(r"isfinite|isinf|isnan|found_inf|check_inf|overflow")


_MENTIONS = re.compile(r"GradScaler|loss_?scal|grad_?scal|NativeScaler|\bscaler\b", re.IGNORECASE)


def optimizer_method(
    machine: Machine, node: ast.Call, optimizer: Optimizer, name: str, arguments: Arguments
) -> Value:
    """What a method of an optimizer does."""
    state = machine.live
    if name == "step":
        _step(machine, node, optimizer, arguments)
    elif name == "zero_grad":
        machine.note("zero_grad", node, optimizer=optimizer.key, many=optimizer.many)
        if contributions(machine) and one_optimizer(machine) and not state.said("stepped"):
            state.put((optimizer.key, node), "zeroed")
        no_gradients(machine)
    elif name in ("state_dict", "load_state_dict"):
        machine.note(f"optimizer.{name}", node, optimizer=optimizer.key)
        return StateOf("optimizer", optimizer.key) if name == "state_dict" else UNKNOWN
    return UNKNOWN


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
            removal(machine.statement, node),
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
    fix = Fix.at(node, "step by scaler", scaler) if scaler else None
    machine.say("AMP803", node, cause, f"write {scaler or 'scaler'}.step({optimizer})", fix)


def _is_of(found: frozenset[Contribution] | None, key: str) -> bool:
    return any(item.scaler == key for item in found or ())


def _has_scale(machine: Machine, found: frozenset[Contribution]) -> bool:
    """Whether the scale is a factor of a part of the gradients at least, and nothing took it out."""
    untouched = not machine.live.said("unscaled")
    return untouched and any(item.scaler for item in found)


def _nothing_looks(machine: Machine) -> bool:
    """Whether gradients were unscaled, and the script has no test of its own for what is not finite."""
    if not is_unscaled(machine):
        return False
    unscaled = [e for e in machine.events.values() if e.kind == "scaler.unscale"]
    inner = len(machine.guards) > min((len(e.guards) for e in unscaled), default=0)
    return bool(unscaled) and not inner and _TESTS.search(machine.script.text) is None


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


def made_optimizer(machine: Machine, node: ast.Call, name: str, arguments: Arguments) -> Optimizer:
    """``torch.optim.X(...)``."""
    given = arguments.get(0, "params")
    models = given.models if isinstance(given, Params) else None
    key = f"L{node.lineno}:{node.col_offset}"
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
