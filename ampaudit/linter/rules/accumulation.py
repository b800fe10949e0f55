"""Rules on gradient accumulation: which calls belong to each batch, and which to each step."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.events import (
    Backward,
    Event,
    GradientRead,
    Guard,
    ManagedZeroGrad,
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
from ampaudit.linter.flow.statement_context import assigned_texts
from ampaudit.linter.flow.syntax import covers_line, dotted_name, last_component

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "Branch",
    "branch_of",
    "check_accumulation",
    "check_branches",
    "check_stepped_either_way",
    "check_zeroed_either_way",
    "excludes",
    "side_of",
]


Branch = tuple[tuple[ast.AST, str], ...]  # conditions with the side of each


def check_accumulation(interpreter: Interpreter, events: list[Event]) -> None:
    """Check unscaling, updating, zeroing, division and synchronization in accumulation loops."""
    if any(e.loop is None for e in of_type(events, Backward)):  # a function that is called for each batch
        alone = [e for e in events if e.loop is None]
        for branch in dict.fromkeys(branch_of(None, e) for e in of_type(alone, Backward)):
            _check_branch(interpreter, None, branch, alone)
    for loop in dict.fromkeys(e.loop for e in of_type(events, Backward) if e.loop is not None):
        inside = [e for e in events if e.is_inside(loop)]
        backwards = [e for e in of_type(inside, Backward) if e.loop is loop]
        _check_inner_loop(interpreter, loop, backwards, events)
        _check_rarely_zeroed(interpreter, loop, backwards, inside)
        for branch in dict.fromkeys(branch_of(loop, e) for e in backwards):
            _check_branch(interpreter, loop, branch, inside)


def _check_branch(
    interpreter: Interpreter, loop: ast.AST | None, branch: Branch, inside: list[Event]
) -> None:
    """Check what happens in a loop where its conditions have these sides."""
    there = [e for e in inside if branch_of(loop, e)[: len(branch)] == branch]
    backwards = [e for e in of_type(there, Backward) if e.loop is loop and branch_of(loop, e) == branch]
    steps = of_type(there, StepEvent)
    gates = _gates(loop, backwards, steps)
    if not gates:
        return
    # another condition on a count may be that of the step, written once more
    always = [e for e in there if branch_of(loop, e) == branch and not _is_conditional(loop, e)]
    _check_unscale(interpreter, always)
    _check_update(interpreter, always, steps)
    if not any(isinstance(e, GradientRead | UnknownBackward) for e in there):
        _check_division(interpreter, backwards)


def branch_of(loop: ast.AST | None, event: Event) -> Branch:
    """Return the conditions between a loop and an event but for those on a count, each with its side."""
    guards = event.guards_inside(loop)
    following = (*(guard.node for guard in guards[1:]), event.node)
    return tuple(
        (guard.node, side_of(guard.node, node))
        for guard, node in zip(guards, following, strict=False)
        if guard.kind == "if" and not _tests_remainder(guard)
    )


def excludes(one: Branch, other: Branch) -> bool:
    """Return whether two branches are different sides of one condition."""
    sides = dict(one)
    return any(sides.get(condition, side) != side for condition, side in other)


def side_of(condition: ast.AST, node: ast.AST) -> str:
    """Return in which part of a condition a node is."""
    line = line_of(node)
    for name in ("body", "orelse"):
        part = getattr(condition, name, [])
        statements = part if isinstance(part, list) else [part]
        if any(covers_line(statement, line) for statement in statements):
            return name
    return ""


def _gates(loop: ast.AST | None, backwards: list[Backward], steps: list[StepEvent]) -> set[ast.AST]:
    """Return the conditions on a count that guard all steps and no backward."""
    if not steps or any(_is_conditional(loop, e) for e in backwards):
        return set()
    per_step = [
        {g.node for g in e.guards_inside(loop) if g.kind == "if" and _tests_remainder(g)} for e in steps
    ]
    return set.intersection(*per_step) - {g.node for e in backwards for g in e.guards_inside(loop)}


def _is_conditional(loop: ast.AST | None, event: Event) -> bool:
    return any(guard.kind == "if" and _tests_remainder(guard) for guard in event.guards_inside(loop))


def _tests_remainder(guard: Guard) -> bool:
    """Return whether a condition tests a remainder, as in ``(i + 1) % accumulate == 0``."""
    test = getattr(guard.node, "test", None)
    return test is not None and any(
        isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(test)
    )


def _check_unscale(interpreter: Interpreter, always: list[Event]) -> None:
    for event in of_type(always, ScalerUnscale):
        interpreter.report(
            "AMP810",
            event.node,
            "unscale_() runs for every batch, but the step only for some: the second call raises, "
            "and later batches would add scaled gradients to unscaled ones",
            "move it under the condition of the step, before clipping",
        )


def _check_update(interpreter: Interpreter, always: list[Event], steps: list[StepEvent]) -> None:
    """Report an update that raises after a batch without a step, as nothing has looked for infinities."""
    looked = {event.scaler for event in of_type(always, ScalerUnscale)}
    stepped = {event.scaler for event in of_type(steps, ScalerStep)} - looked
    for event in of_type(always, ScalerUpdate):
        if event.scaler in stepped:
            interpreter.report(
                "AMP806",
                event.node,
                "update() runs for every batch, but the step only for some: without a step, it raises",
                "move it under the condition of the step, after it",
            )


def _check_division(interpreter: Interpreter, backwards: list[Backward]) -> None:
    for event in backwards:
        if event.loss.loss and event.loss.divided is False:
            _report_undivided(interpreter, event, Certainty.KNOWN)


def _report_undivided(interpreter: Interpreter, event: Backward, certainty: Certainty) -> None:
    interpreter.report(
        "AMP830",
        event.node,
        "the gradients of several batches are summed, but each loss is a mean over "
        "one batch: the sum is too large by the number of batches",
        "divide the loss by the number of accumulated batches before backward",
        certainty=certainty,
    )


_COUNTS_BATCHES = re.compile(r"accum|micro|grad_steps|virtual")
# a loss of a whole batch, gathered from its parts, is no mean over one part
_DIVIDES = re.compile(r"/|mean\(|\* *\(?1|\bcat\(|concat|gather|stack\(")


def _check_inner_loop(
    interpreter: Interpreter, loop: ast.AST, backwards: list[Backward], events: list[Event]
) -> None:
    """Check a loop over the batches of one step, which follows the loop."""
    if not isinstance(loop, ast.For) or not _COUNTS_BATCHES.search(ast.unparse(loop.iter).lower()):
        return
    steps = [e for e in of_type(events, StepEvent) if not e.is_inside(loop)]
    if not steps or _DIVIDES.search("\n".join(map(ast.unparse, loop.body))):
        return
    for event in backwards:
        if event.loss.loss == "" and event.loss.divided is None:
            _report_undivided(interpreter, event, Certainty.LIKELY)


def _check_rarely_zeroed(
    interpreter: Interpreter, loop: ast.AST, backwards: list[Backward], inside: list[Event]
) -> None:
    """Report a step for every batch, whose gradients are zeroed only for some."""
    by_hand = interpreter.linked.mentions(r"\.grad = None")
    if by_hand or not backwards or any(isinstance(e, UnknownEffect | UnknownBackward) for e in inside):
        return
    for event in of_type(inside, StepEvent):
        optimizers = ("", event.optimizer)  # a model's zero_grad names none
        zeroed = [e for e in of_type(inside, ZeroGrad) if e.optimizer in optimizers]
        is_gated = bool(zeroed) and all(_is_conditional(loop, e) for e in zeroed)
        calls = [guard.node for guard in event.guards_inside(loop) if guard.kind == "call"]
        if not is_gated or len(calls) != len(event.guards_inside(loop)):
            continue
        interpreter.report(
            "AMP839",
            calls[0] if calls else event.node,
            "the optimizer steps for every batch, but the gradients are zeroed only for some: a step "
            "applies those of earlier batches again",
            "step under the same condition as zero_grad()",
        )


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
