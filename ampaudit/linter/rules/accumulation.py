"""Rules on gradient accumulation: which calls belong to each batch, and which to each step."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.event_place import Guard
from ampaudit.linter.flow.events import (
    Backward,
    Event,
    GradientRead,
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
from ampaudit.linter.flow.syntax import covers_line

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["Branch", "branch_of", "check_accumulation", "excludes", "side_of"]

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
        steps = of_type(inside, StepEvent)
        by_hand = interpreter.linked.mentions("all_reduce")
        if steps and not by_hand and not any(e.synchronizes for e in backwards):
            _report_never_synchronized(interpreter, steps[0])
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
    _check_zero_grad(interpreter, always)
    if not any(isinstance(e, GradientRead | UnknownBackward) for e in there):
        _check_division(interpreter, backwards)
    _check_synchronization(interpreter, there, backwards)


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
                "AMP825",
                event.node,
                "update() runs for every batch, but the step only for some: without a step, it raises",
                "move it under the condition of the step, after it",
            )


def _check_zero_grad(interpreter: Interpreter, always: list[Event]) -> None:
    for event in of_type(always, ZeroGrad):
        interpreter.report(
            "AMP831",
            event.node,
            "the gradients are zeroed for every batch, but the step "
            "runs only for some: nothing is accumulated",
            "move zero_grad() under the condition of the step, after it",
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


def _check_synchronization(interpreter: Interpreter, inside: list[Event], backwards: list[Backward]) -> None:
    models = [e.model for e in of_type(inside, ModelCall)]
    if not any(model.wrapper == "DistributedDataParallel" for model in models):
        return
    if interpreter.linked.mentions("no_sync|require_backward_grad_sync"):
        return
    for event in backwards:
        interpreter.report(
            "AMP833",
            event.node,
            "the gradients are synchronized for every batch, although only some batches step",
            "run the batches that do not step under 'with model.no_sync():'",
        )


def _report_never_synchronized(interpreter: Interpreter, step: Event) -> None:
    interpreter.report(
        "AMP834",
        step.node,
        "every backward before this step runs under no_sync(): each process steps with different gradients",
        "run the last backward before a step outside no_sync()",
    )
