"""Rules on gradient accumulation: which calls belong to each batch, and which to each step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from ampaudit.linter.diagnostic import Certainty, Mistake, line_of
from ampaudit.linter.flow.events import (
    Backward,
    BranchesFollowed,
    EntryPointFollowed,
    Event,
    Guard,
    ManagedZeroGrad,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
    StepEvent,
    UnknownBackward,
    UnknownEffect,
    ZeroGrad,
    of_type,
)
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.statement_context import assigned_values
from ampaudit.linter.flow.syntax import (
    calls,
    condition_of,
    covers_line,
    dotted_name,
    last_component,
    mentions,
    tests_remainder,
    walk,
)
from ampaudit.linter.rules.rule import rule

Branch = tuple[tuple[ast.AST | str, str | bool], ...]  # conditions with the side or the truth of each


@lru_cache(maxsize=1)
def _accumulations(flow: Interpreter, followed: EntryPointFollowed) -> list[tuple[list[Event], list[Event]]]:
    """Return the events of the branches that step only for some batches, and which of them are for each.

    They are branches of loops, or of functions that are called for each batch. Several rules ask for them.
    """
    events, accumulations = followed.events, []
    for loop in dict.fromkeys(e.loop for e in of_type(events, Backward)):
        inside = [e for e in events if (e.loop is None if loop is None else e.is_inside(loop))]
        if not any(_is_on_count(flow, loop, e) for e in of_type(inside, StepEvent)):
            continue
        backwards = [e for e in of_type(inside, Backward) if e.loop is loop]
        for branch in dict.fromkeys(branch_of(flow, loop, e) for e in backwards):
            there = [e for e in inside if branch_of(flow, loop, e)[: len(branch)] == branch]
            steps = of_type(there, StepEvent)
            # another condition on a count may be that of the step, written once more
            always = [
                e for e in there if branch_of(flow, loop, e) == branch and not _is_on_count(flow, loop, e)
            ]
            is_gated = bool(steps) and all(_is_on_count(flow, loop, e) for e in steps)
            if is_gated and all(e in always for e in backwards if branch_of(flow, loop, e) == branch):
                accumulations.append((there, always))
    return accumulations


def branch_of(flow: Interpreter, loop: ast.AST | None, event: Event) -> Branch:
    """Return the conditions between a loop and an event but for those on a count, each with its side."""
    guards = event.guards_inside(loop)
    following = (*(guard.node for guard in guards[1:]), event.node)
    return tuple(
        _truth(flow, guard.node, side_of(guard.node, node))
        for guard, node in zip(guards, following, strict=False)
        if guard.kind == "if" and not _is_on_remainder(flow, guard)
    )


def _truth(flow: Interpreter, condition: ast.AST, side: str) -> tuple[ast.AST | str, str | bool]:
    """Return a condition on a setting with its truth on a side, and any other with the side."""
    test = getattr(condition, "test", None)
    flag = condition_of(test) if test is not None else None
    if flag is None or flag[0] in flow.linked.script_of(condition).changing:
        return condition, side
    return flag[0], flag[1] == (side == "body")  # behind a branch that leaves, the condition is false


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


def _is_on_count(flow: Interpreter, loop: ast.AST | None, event: Event) -> bool:
    """Return whether a condition in a loop lets an event happen only for some batches."""
    return any(_is_on_remainder(flow, guard) for guard in event.guards_inside(loop))


def _is_on_remainder(flow: Interpreter, guard: Guard) -> bool:
    """Return whether a guard is a condition on a count of batches, which the flow may have followed."""
    test = getattr(guard.node, "test", None)
    if guard.kind != "if" or test is None:
        return False
    return tests_remainder(test) or not flow.tests_of_counts.isdisjoint(walk(test))


def _tests_remainder(guard: Guard) -> bool:
    """Return whether a guard is a condition on a remainder, as in ``(i + 1) % accumulate == 0``."""
    test = getattr(guard.node, "test", None)
    return guard.kind == "if" and test is not None and tests_remainder(test)


@rule("AMP810", EntryPointFollowed)
def _unscaled_for_each_batch(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    for _events, always in _accumulations(flow, followed):
        for event in of_type(always, ScalerUnscale):
            yield Mistake(
                event.node,
                "unscale_() runs for every batch, but the step only for some: the second call raises, "
                "and later batches would add scaled gradients to unscaled ones",
                "move it under the condition of the step, before clipping",
            )


@rule("AMP806", EntryPointFollowed)
def _updated_for_each_batch(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check for an update that raises after a batch without a step, as nothing has looked for infinities."""
    for events, always in _accumulations(flow, followed):
        stepped = {event.scaler for event in of_type(events, ScalerStep)}
        looked = {event.scaler for event in of_type(always, ScalerUnscale)}
        for event in of_type(always, ScalerUpdate):
            if event.needs_step and event.scaler in stepped - looked:
                yield Mistake(
                    event.node,
                    "update() runs for every batch, but the step only for some: without a step, it raises",
                    "move it under the condition of the step, after it",
                )


@rule("AMP839", EntryPointFollowed)
def _rarely_zeroed(_: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    for loop in dict.fromkeys(e.loop for e in of_type(followed.events, Backward) if e.loop is not None):
        inside = [e for e in followed.events if e.is_inside(loop)]
        if of_type(inside, UnknownEffect, UnknownBackward):
            continue
        for event in of_type(inside, StepEvent):
            optimizers = ("", event.optimizer)  # a model's zero_grad names none
            zeroed = [e for e in of_type(inside, ZeroGrad) if e.optimizer in optimizers]
            calls = [guard.node for guard in event.guards_inside(loop) if guard.kind == "call"]
            is_gated = bool(zeroed) and all(any(map(_tests_remainder, e.guards_inside(loop))) for e in zeroed)
            if not is_gated or len(calls) != len(event.guards_inside(loop)):
                continue
            attributes = (node for node in walk(loop) if isinstance(node, ast.Attribute))
            if not any(node.attr == "grad" and isinstance(node.ctx, ast.Store) for node in attributes):
                yield Mistake(
                    calls[0] if calls else event.node,
                    "the optimizer steps for every batch, but the gradients are zeroed only for some: a step "
                    "applies those of earlier batches again",
                    "step under the same condition as zero_grad()",
                )


@rule("AMP839", BranchesFollowed)
def _zeroed_on_one_branch(flow: Interpreter, branches: BranchesFollowed) -> Iterator[Mistake]:
    """Check a loop that zeroes the gradients if a condition holds, and steps without if it does not."""
    for run, counterpart in ((branches.one, branches.other), (branches.other, branches.one)):
        if any(isinstance(e, ZeroGrad | UnknownEffect | UnknownBackward | ManagedZeroGrad) for e in run):
            continue
        zeroed = {guard.node for e in of_type(counterpart, ZeroGrad) for guard in e.guards}
        stepped = {e.loop for e in of_type(run, StepEvent) if not _may_zero_itself(flow, e)}
        for event in of_type(run, Backward):
            if event.loop is not None and event.loop in stepped & zeroed:
                yield Mistake(
                    event.node,
                    "on this branch the optimizer steps but the gradients are never zeroed: each step uses "
                    "the sum of all batches so far",
                    "call optimizer.zero_grad() in every iteration, outside of the condition",
                )


def _may_zero_itself(flow: Interpreter, step: StepEvent) -> bool:
    """Return whether an optimizer is of a class that is not known, and that may zero the gradients."""
    assignments = flow.point.script.assigned.get(step.optimizer.removeprefix("name "), ())
    values = (item.value for item in assignments)
    classes = (last_component(dotted_name(v.func)) for v in values if isinstance(v, ast.Call))
    return step.optimizer.startswith("name ") and any(name[:1].isupper() for name in classes)


@rule("AMP828", EntryPointFollowed)
def _skipped_update(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check for ``unscale_`` that runs always where ``update`` runs only if a computed condition allows."""
    for event in of_type(followed.events, ScalerUnscale):
        updates = [e for e in of_type(followed.events, ScalerUpdate) if e.scaler == event.scaler]
        conditions = {_condition_beyond(event, e) for e in updates}
        condition = conditions.pop() if len(conditions) == 1 else None
        if condition is None or not _is_computed(flow, condition, event):
            continue
        if len({side_of(condition, e.node) == "orelse" for e in updates}) == 1:
            skips = isinstance(condition.body[-1], ast.Continue)
            yield Mistake(
                condition.body[-1] if skips else updates[0].node,
                f"update() is left out where the condition of line {line_of(condition)} skips the step: the "
                "next unscale_() raises",
                "call scaler.update() after the condition, whether the step was skipped or not",
                certainty=Certainty.LIKELY,
            )


def _condition_beyond(event: Event, other: Event) -> ast.If | None:
    """Return the first condition around another event but not around this one, if only conditions are."""
    shared = 0
    while shared < min(len(event.guards), len(other.guards)) and event.guards[shared] == other.guards[shared]:
        shared += 1
    is_elsewhere = any(guard.kind in ("if", "loop") for guard in event.guards[shared:])
    beyond = other.guards[shared:]
    if is_elsewhere or not beyond or any(guard.kind != "if" for guard in beyond):
        return None
    return beyond[0].node if isinstance(beyond[0].node, ast.If) else None


def _is_computed(flow: Interpreter, condition: ast.If, event: Event) -> bool:
    """Return whether a condition depends on the gradients or the loss rather than on a setting."""
    is_setting = mentions(condition.test, "precision", "fp16", "amp", "scaler", "dtype")
    if is_setting or tests_remainder(condition.test):
        return False
    ends = any(isinstance(n, ast.Raise | ast.Break) for n in ast.walk(condition))
    values = (condition.test, *assigned_values(flow.linked, event.node, condition.test))
    computed = any(mentions(value, "norm", "finite", "nan", "isinf", "grad", "skip") for value in values)
    return computed and not ends and not calls(condition, "exit", "GradScaler")
