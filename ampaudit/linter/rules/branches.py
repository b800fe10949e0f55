"""Rules on calls that one branch of a training loop makes and another omits."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.event_place import Guard
from ampaudit.linter.flow.events import (
    Backward,
    Event,
    ModelCall,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
    StepEvent,
    UnknownBackward,
    UnknownEffect,
    ZeroGrad,
    of_type,
)
from ampaudit.linter.flow.managed_events import ManagedZeroGrad
from ampaudit.linter.flow.statement_context import assigned_texts
from ampaudit.linter.flow.syntax import dotted_name, last_component
from ampaudit.linter.rules.accumulation import branch_of, excludes, side_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_branches", "check_stepped_either_way", "check_zeroed_either_way"]


def check_branches(interpreter: Interpreter, events: list[Event]) -> None:
    """Check loops for gradients that one branch never zeroes, and for an update that one leaves out."""
    for loop in dict.fromkeys(e.loop for e in of_type(events, Backward) if e.loop is not None):
        inside = [e for e in events if e.is_inside(loop)]
        _check_zeroed(interpreter, loop, inside)
        _check_exchanged(interpreter, loop, inside, events)
    _check_skipped_update(interpreter, events)


def _check_zeroed(interpreter: Interpreter, loop: ast.AST, inside: list[Event]) -> None:
    zeroed = [branch_of(loop, e) for e in of_type(inside, ZeroGrad)]
    if not zeroed or not all(zeroed) or ".grad = None" in ast.unparse(loop):
        return
    stepped = [branch_of(loop, e) for e in of_type(inside, StepEvent)]
    unknown = [branch_of(loop, e) for e in inside if isinstance(e, UnknownEffect | UnknownBackward)]
    for event in of_type(inside, Backward):
        branch = branch_of(loop, event)
        alone = all(excludes(branch, other) for other in (*zeroed, *unknown))
        if event.loop is loop and branch and alone and branch in stepped:
            _report_unzeroed(interpreter, event)


def check_zeroed_either_way(interpreter: Interpreter, one: list[Event], other: list[Event]) -> None:
    """Check a loop that zeroes the gradients if a condition holds, and steps without if it does not."""
    for run, counterpart in ((one, other), (other, one)):
        zeroed = {guard.node for e in of_type(counterpart, ZeroGrad) for guard in e.guards}
        if any(isinstance(e, ZeroGrad | UnknownEffect | UnknownBackward | ManagedZeroGrad) for e in run):
            continue
        steps = of_type(run, StepEvent)
        stepped = {e.loop for e in steps if not _may_zero_itself(interpreter, e)}
        for event in of_type(run, Backward):
            if event.loop is not None and event.loop in stepped & zeroed:
                _report_unzeroed(interpreter, event)


def check_stepped_either_way(interpreter: Interpreter, one: list[Event], other: list[Event]) -> None:
    """Check that a scaler steps no optimizer whose models are called only if a condition holds."""
    for run, counterpart in ((one, other), (other, one)):
        if any(isinstance(e, UnknownEffect | UnknownBackward) for e in run) or not of_type(run, Backward):
            continue
        called = {e.model.key for e in of_type(run, ModelCall)}
        texts = {e.callee for e in of_type(run, ModelCall)}  # a name may hold one model of several
        trained = [e for e in of_type(counterpart, ModelCall) if "no_grad" not in e.grad_modes]
        elsewhere = {e.model.key for e in trained if e.callee not in texts}
        for step in of_type(run, ScalerStep):
            models = interpreter.models_by_optimizer.get(step.optimizer, frozenset())
            if models and models <= elsewhere and not models & called and step.loop is not None:
                interpreter.report(
                    "AMP829",
                    step.node,
                    "where a condition holds, no model of this optimizer is called in an iteration, but the "
                    "scaler steps it: without gradients it raises",
                    "step it under the condition under which its loss is computed",
                    certainty=Certainty.LIKELY,
                )


def _may_zero_itself(interpreter: Interpreter, step: StepEvent) -> bool:
    """Return whether an optimizer is of a class that is not known, and that may zero the gradients."""
    values = interpreter.script.assigned.get(step.optimizer.removeprefix("name "), ())
    classes = (last_component(dotted_name(v.func)) for v in values if isinstance(v, ast.Call))
    return step.optimizer.startswith("name ") and any(name[:1].isupper() for name in classes)


def _report_unzeroed(interpreter: Interpreter, event: Event) -> None:
    interpreter.report(
        "AMP839",
        event.node,
        "on this branch the optimizer steps but the gradients are never zeroed: each step uses the sum"
        " of all batches so far",
        "call optimizer.zero_grad() in every iteration, outside of the condition",
    )


def _check_exchanged(
    interpreter: Interpreter, loop: ast.AST, inside: list[Event], events: list[Event]
) -> None:
    """Report a second step of one optimizer in an iteration where another is zeroed but never stepped."""
    steps = [e for e in of_type(inside, StepEvent) if e.loop is loop and e.optimizer]
    zeroed = {e.optimizer for e in of_type(inside, ZeroGrad)} - {""}
    idle = zeroed - {e.optimizer for e in of_type(events, StepEvent)}
    unsure = any(not e.optimizer for e in of_type(events, StepEvent))
    if not idle or unsure or idle & interpreter.escaped or of_type(events, UnknownEffect):
        return
    for index, step in enumerate(steps):
        again = [e for e in steps[:index] if e.optimizer == step.optimizer and e.node is not step.node]
        if again and branch_of(loop, again[0]) == branch_of(loop, step):
            interpreter.report(
                "AMP829",
                step.node,
                f"this optimizer was stepped at line {line_of(again[0].node)} already, and "
                "another, whose gradients are zeroed in this loop, is never stepped",
                "step each optimizer after the backward of its own loss",
                certainty=Certainty.LIKELY,
            )


def _check_skipped_update(interpreter: Interpreter, events: list[Event]) -> None:
    """Check for ``unscale_`` that runs always where ``update`` runs only if a computed condition allows."""
    updates = of_type(events, ScalerUpdate)
    for event in of_type(events, ScalerUnscale):
        later = [e for e in updates if e.scaler == event.scaler]
        extra = [_guards_beyond(event, e) for e in later]
        conditions = [guards[0].node for guards in extra if guards]
        if not later or len(conditions) < len(extra):
            continue
        first, together = conditions[0], len(set(conditions)) == 1
        sides = {side_of(first, e.node) == "orelse" for e in later}
        if together and len(sides) == 1 and _is_computed(interpreter, first, event):
            interpreter.report(
                "AMP828",
                _leaves_at(first) or later[0].node,
                f"update() is left out where the condition of line {line_of(first)} skips "
                "the step: the next unscale_() raises",
                "call scaler.update() after the condition, whether the step was skipped or not",
                certainty=Certainty.LIKELY,
            )


def _leaves_at(condition: ast.AST) -> ast.Continue | None:
    """Return the statement that leaves the iteration if a condition holds, if there is one."""
    last = condition.body[-1] if isinstance(condition, ast.If) else None
    return last if isinstance(last, ast.Continue) else None


def _guards_beyond(event: Event, other: Event) -> list[Guard] | None:
    """Return the conditions around another event but not around this one; ``None`` if it is elsewhere."""
    shared = 0
    while shared < min(len(event.guards), len(other.guards)) and event.guards[shared] == other.guards[shared]:
        shared += 1
    if any(guard.kind in ("if", "loop") for guard in event.guards[shared:]):
        return None
    beyond = other.guards[shared:]
    return None if any(g.kind != "if" for g in beyond) else list(beyond)


def _is_computed(interpreter: Interpreter, condition: ast.AST, event: Event) -> bool:
    """Return whether a condition depends on the gradients or the loss rather than on a setting."""
    if not isinstance(condition, ast.If) or any(isinstance(n, ast.Mod) for n in ast.walk(condition.test)):
        return False
    values = assigned_texts(interpreter.linked, event.node, condition.test)
    if _SETTING.search(ast.unparse(condition.test)):
        return False
    other_side = "\n".join(map(ast.unparse, (*condition.body, *condition.orelse)))
    ends = any(word in other_side for word in ("raise ", "exit(", "break", "GradScaler("))
    return not ends and any(map(_COMPUTED.search, (ast.unparse(condition.test), *values)))


_SETTING = re.compile(r"precision|fp16|amp|scaler|dtype")
_COMPUTED = re.compile(r"norm|finite|isnan|isinf|\bnan|grad")
