"""Rules on calls of a scaler that are missing or too frequent, such as update, save and restore."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ampaudit.linter.diagnostic import Certainty, Fix, Mistake, file_number
from ampaudit.linter.flow.events import (
    AutocastEntered,
    Backward,
    CheckpointSaved,
    EntryPointFollowed,
    Event,
    NumberRead,
    OptimizerMade,
    OptimizerRestored,
    ScaleCompared,
    ScalerEvent,
    ScalerMade,
    ScalerReplaced,
    ScalerRestored,
    ScalerSaved,
    ScalerScale,
    ScalerStep,
    ScalerUpdate,
    ScriptFollowed,
    of_type,
)
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.statement_context import conditions_around, location_suffix
from ampaudit.linter.flow.syntax import (
    calls,
    dotted_name,
    last_component,
    mentions,
    receiver_name,
    simple_name,
    walk,
)
from ampaudit.linter.flow.values import MAYBE, UNSCALED, StateDict
from ampaudit.linter.rules.rule import rule


@rule("AMP814", ScalerReplaced)
def _replaced(flow: Interpreter, event: ScalerReplaced) -> Iterator[Mistake]:
    restores = any(calls(script.tree, "load_state_dict") for script in flow.linked.scripts)
    if restores and any(word in event.function for word in ("fit", "train", "run", "epoch")):
        yield Mistake(
            event.node,
            "this replaces the scaler that the object has, and whose state a checkpoint may have restored",
            "create the scaler once, in the constructor",
            certainty=Certainty.LIKELY,
        )


@rule("AMP814", EntryPointFollowed)
def _made_in_loop(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check that a loop which trains one model does not create a scaler."""
    events = followed.events
    for creation in of_type(events, ScalerMade) if not _is_bfloat16(events) else ():
        for index, guard in enumerate(creation.guards):
            if guard.kind != "loop":
                continue
            inside = [event for event in events if event.is_inside(guard.node)]
            # a loop around the call of the function that creates it may train one model per call
            call = next((g for g in creation.guards[index:] if isinstance(g.node, ast.Call)), None)
            steps = [e for e in of_type(inside, ScalerStep) if e.scaler == creation.scaler]
            used_outside = call is None or any(call not in e.guards for e in steps)
            is_made_before = any(e.optimizer and not e.optimizer.startswith("name ") for e in steps)
            is_known = used_outside or is_made_before
            trains = any(isinstance(event, Backward | ScalerScale) for event in inside)
            lives_on = is_known or any(_comes_from_outside(flow, e, guard.node) for e in steps)
            lives_on &= trains and not of_type(inside, OptimizerMade)
            # one that is made where it is first used is made once
            if lives_on and not any(map(_tests_absence, conditions_around(flow.linked, creation.node))):
                yield Mistake(
                    creation.node,
                    "each pass of the loop creates a new scaler, which starts at its initial scale again "
                    "instead of the scale that was found",
                    "create the scaler once, before the loop",
                    certainty=Certainty.KNOWN if is_known else Certainty.LIKELY,
                )


def _comes_from_outside(flow: Interpreter, step: ScalerStep, loop: ast.AST) -> bool:
    """Return whether neither a loop nor what it calls binds the name of the optimizer of a step."""
    name, inside = step.optimizer.removeprefix("name "), walk(loop)
    called = [g.node for g in step.guards if isinstance(g.node, ast.Call) and g.node in inside]
    entered = {simple_name(node.func) for node in inside if isinstance(node, ast.Call)}
    assigned = [item for script in flow.linked.scripts for item in script.assigned.get(name, ())]
    makers = {getattr(item.function, "name", "") for item in assigned}
    if name.startswith("self."):
        owners = {receiver_name(call).split(".")[0] for call in called}
        is_passed = makers == {"__init__"} and "" not in owners
    else:
        owners = {name, name.split(".")[0]}
        is_passed = any(dotted_name(node) == name for node in inside) and not makers & entered
    bound = {dotted_name(node) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)}
    return is_passed and not owners & bound


def _is_bfloat16(events: Iterable[Event]) -> bool:
    """Return whether autocast is always to bfloat16, which needs no scaler."""
    return {event.context.dtype for event in of_type(events, AutocastEntered)} == {"bfloat16"}


def _tests_absence(test: ast.expr) -> bool:
    """Return whether a condition is like ``self.scaler is None`` or ``not scaler``."""
    return isinstance(test, ast.UnaryOp | ast.Compare | ast.Call) and mentions(test, "scaler")


@rule("AMP823", NumberRead)
def _scaled_number(_: Interpreter, event: NumberRead) -> Iterator[Mistake]:
    if event.value.scaler_key not in (UNSCALED, MAYBE):
        yield Mistake(
            event.node,
            "this number includes the loss scale, which changes during training",
            "read the loss before it is scaled",
        )


@rule("AMP827", ScaleCompared)
def _growth_taken_for_skip(_: Interpreter, event: ScaleCompared) -> Iterator[Mistake]:
    statement = event.statement
    if statement is None:
        return
    leaves = any(isinstance(node, ast.Return | ast.Continue) for node in ast.walk(statement))
    compares = [op for node in ast.walk(statement) if isinstance(node, ast.Compare) for op in node.ops]
    tells_growth_apart = any(isinstance(op, ast.Lt | ast.Gt | ast.LtE | ast.GtE) for op in compares)
    if not tells_growth_apart and (leaves or mentions(statement, "skip", "overflow", "step", "did_")):
        yield Mistake(
            event.node,
            "the scale changes also when it grows, after 2,000 good steps: an unequal scale does not mean "
            "that a step was skipped",
            "compare with <: the step was skipped if scaler.get_scale() < scale_before",
        )


@rule("AMP804", ScriptFollowed)
def _never_updated(flow: Interpreter, followed: ScriptFollowed) -> Iterator[Mistake]:
    """Check that what steps with a scaler also updates it, perhaps by another name."""
    updated = {e.scaler for e in of_type(followed.events, ScalerUpdate)}
    scaled = {e.scaler for e in of_type(followed.events, ScalerScale)} - updated - flow.escaped
    names = {
        last_component(text)
        for script in flow.linked.scripts
        for text, used in script.usage.methods.items()
        if "update" in used
    }
    for step in of_type(followed.events, ScalerStep):
        scaler = flow.scalers.get(step.scaler)
        if scaler is None or step.scaler not in scaled or last_component(scaler.text) in names:
            continue
        if "name " in step.scaler and updated:
            continue
        statement, text = step.statement, receiver_name(step.node)
        alone = isinstance(statement, ast.Expr) and statement.value is step.node and text and step.optimizer
        repeats = any(guard.kind == "loop" for guard in step.guards)  # else the loop elsewhere may update it
        yield Mistake(
            step.node,
            "update() is never called: the scale never changes, and the next unscale_() or step raises",
            f"call {scaler.text or 'scaler'}.update() once, after the step",
            Fix.at(statement, "insert after", f"{text}.update()")
            if statement and alone and repeats
            else None,
            Certainty.KNOWN if repeats else Certainty.LIKELY,
        )
        return


@rule("AMP820", ScriptFollowed)
def _never_saved(flow: Interpreter, followed: ScriptFollowed) -> Iterator[Mistake]:
    of_script = {scaler.key for scaler in flow.scalers.values() if scaler.node is not None}
    saved = {e.scaler for e in of_type(followed.events, ScalerSaved)}
    steps = of_type(followed.events, ScalerStep)
    missing = of_script & {e.scaler for e in steps} - saved
    # the name of an unknown scaler may be another one's
    if not _owns_scaler(flow, followed) or (saved and not (missing and saved <= of_script)):
        return
    resumes = bool(of_type(followed.events, OptimizerRestored))
    for events in followed.events_by_entry:
        for event in of_type(events, CheckpointSaved):
            states = [value for value in event.entries.items if isinstance(value, StateDict)]
            optimizers = {state.key for state in states if state.kind == "optimizer"}
            its_scalers = {e.scaler for e in steps if e.target is not None and e.target.key in optimizers}
            if its_scalers & missing if saved else optimizers and resumes:
                place = _place_here(event, event.entries.node)
                yield Mistake(
                    place,
                    f"the checkpoint{location_suffix(event.entries.node, place)} contains the optimizer's "
                    "state but not the scaler's: a resumed run starts at a scale that overflows",
                    "save scaler.state_dict() as well",
                    None if saved else _save_scaler_fix(flow, events, event),
                )


@rule("AMP820", ScriptFollowed)
def _never_restored(flow: Interpreter, followed: ScriptFollowed) -> Iterator[Mistake]:
    if not _owns_scaler(flow, followed) or of_type(followed.events, ScalerRestored):
        return
    for event in of_type(followed.events, OptimizerRestored)[:1]:  # one place is enough to restore it
        place = _place_here(event, event.node)
        yield Mistake(
            place,
            f"the optimizer resumes from a checkpoint{location_suffix(event.node, place)}, but the scaler "
            "starts over, at a scale that overflows",
            "restore it as well: scaler.load_state_dict(checkpoint[...])",
        )


def _owns_scaler(flow: Interpreter, followed: ScriptFollowed) -> bool:
    """Return whether a script keeps the scaler that it makes, and needs, without leaving it to other code."""
    if any(code == "AMP818" for code, *_ in flow.diagnostics) or _is_bfloat16(followed.events):
        return False
    if not of_type(followed.events, AutocastEntered) and flow.linked.mentions("bfloat16"):
        return False  # it may be the dtype of a model's own autocast
    creations = of_type(followed.events, ScalerMade)
    checkpoints = of_type(followed.events, CheckpointSaved, OptimizerRestored)
    in_variables = (e.guards for e in creations if e.value.text.isidentifier())
    # calls and iterations at whose end a scaler is gone, and the next makes another
    passing = {guard for guards in in_variables for guard in guards if guard.kind != "if"}
    passing = passing.difference(*(event.guards for event in checkpoints))
    stepped = {e.scaler for e in of_type(followed.events, ScalerStep) if passing.isdisjoint(e.guards)}
    enabled = {key: scaler for key, scaler in flow.scalers.items() if scaler.enabled is not False}
    # a scaler of unknown origin may be one of these
    stepped &= {key for key, scaler in enabled.items() if scaler.node is not None or not passing}
    return bool(stepped and creations) and not stepped & flow.escaped


def _place_here(event: Event, node: ast.AST) -> ast.AST:
    """Return a node or, if it is in an imported file, the call in this file that leads there."""
    calls = (guard.node for guard in reversed(event.guards) if isinstance(guard.node, ast.Call))
    return next((place for place in (node, *calls) if not file_number(place)), node)


def _save_scaler_fix(flow: Interpreter, events: list[Event], event: CheckpointSaved) -> Fix | None:
    """Return the fix that saves the scaler, if its name is in scope where the checkpoint is written."""
    node, texts = event.entries.node, {scaler.text for scaler in flow.scalers.values() if scaler.text}
    if len(texts) != 1 or not isinstance(node, ast.Dict) or _calls_function(event):
        return None
    text = texts.pop()
    used_here = any(isinstance(e, ScalerEvent | ScalerStep) and not _calls_function(e) for e in events)
    if not (used_here or text.startswith("self.")):
        return None
    names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
    can_add = names and len(names) == len(node.keys) and "scaler" not in names
    return Fix.at(node, "add entry", "scaler", f"{text}.state_dict()") if can_add else None


def _calls_function(event: Event) -> bool:
    """Return whether an event happens in a function that is called from elsewhere."""
    return any(guard.kind == "call" and isinstance(guard.node, ast.Call) for guard in event.guards)
