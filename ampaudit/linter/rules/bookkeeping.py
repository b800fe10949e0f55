"""Rules on calls that are missing or too frequent, such as update, save and restore."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, Fix, file_number
from ampaudit.linter.flow.events import (
    Backward,
    CheckpointSaved,
    Event,
    Guard,
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
    of_type,
)
from ampaudit.linter.flow.syntax import calls_method, last_component, receiver_name
from ampaudit.linter.flow.values import MAYBE, UNSCALED, DictLiteral, Parameters, StateDict

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_loops", "check_updates_and_checkpoints"]


def check_loops(interpreter: Interpreter, events: list[Event]) -> None:
    """Check the loops of one entry point."""
    _check_created_in_loop(interpreter, events)
    for replaced in of_type(events, ScalerReplaced):
        _check_replaced(interpreter, replaced)
    for read in of_type(events, NumberRead):
        _check_item(interpreter, events, read)
    for compared in of_type(events, ScaleCompared):
        _check_compared(interpreter, compared)


def _check_replaced(interpreter: Interpreter, event: ScalerReplaced) -> None:
    restores = all(interpreter.linked.mentions(word) for word in ("scaler", r"\.load_state_dict\("))
    if restores and re.search(r"fit|train|run|epoch", event.function):
        interpreter.report(
            "AMP814",
            event.node,
            "this replaces the scaler that the object has, and whose state a checkpoint may have restored",
            "create the scaler once, in the constructor",
            certainty=Certainty.LIKELY,
        )


_SKIPS = re.compile(r"skip|overflow|stepped|return|continue|\.step\(|did_")


def _check_compared(interpreter: Interpreter, event: Event) -> None:
    """Check that a decision about skipped steps does not count the growth of the scale."""
    statement = event.statement
    if statement is not None and _SKIPS.search(ast.unparse(statement)):
        interpreter.report(
            "AMP827",
            event.node,
            "the scale changes also when it grows, after 2,000 good steps: an unequal scale does not mean "
            "that a step was skipped",
            "compare with <: the step was skipped if scaler.get_scale() < scale_before",
        )


def _check_created_in_loop(interpreter: Interpreter, events: list[Event]) -> None:
    for creation in of_type(events, ScalerMade):
        calls = [i for i, guard in enumerate(creation.guards) if isinstance(guard.node, ast.Call)]
        for index, guard in enumerate(creation.guards):
            if guard.kind != "loop":
                continue
            inside = [event for event in events if event.is_inside(guard.node)]
            # a loop around the call of the function that creates it may train one model per call
            outlives_call = index > (calls[-1] if calls else -1) or _optimizer_before(events, guard.node)
            trains = any(isinstance(event, Backward | ScalerScale) for event in inside)
            if trains and not of_type(inside, OptimizerMade) and outlives_call:
                interpreter.report(
                    "AMP814",
                    creation.node,
                    "a new scaler in every iteration forgets the scale "
                    "it has found and starts at 65,536 again",
                    "create the scaler once, before the loop",
                )


def _optimizer_before(events: list[Event], loop: ast.AST) -> bool:
    """Return whether an optimizer was made in the function of a loop, before it."""
    around = next(e.guards for e in events if e.is_inside(loop))
    place = next(i for i, guard in enumerate(around) if guard.node is loop)
    outside = around[:place]
    creations = of_type(events, OptimizerMade)
    return any(
        e.guards == outside[: len(e.guards)] and _calls(e.guards) == _calls(outside) for e in creations
    )


def _calls(guards: tuple[Guard, ...]) -> list[Guard]:
    return [guard for guard in guards if guard.kind == "call"]


def _check_item(interpreter: Interpreter, events: list[Event], event: NumberRead) -> None:
    value = event.value
    if value.scaler_key not in (UNSCALED, MAYBE):
        interpreter.report(
            "AMP823",
            event.node,
            "this number includes the loss scale, which changes during training",
            "read the loss before it is scaled",
        )


def _as_often(event: Event, other: Event, loop: ast.AST) -> bool:
    """Return whether an event happens in every iteration in which another one does."""
    allowed = {guard.node for guard in other.guards_inside(loop)}
    return all(guard.node in allowed or guard.kind in ("with", "call") for guard in event.guards_inside(loop))


def check_updates_and_checkpoints(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    """Check a whole file."""
    events = [event for events in events_by_entry for event in events]
    _check_updated(interpreter, events)
    stepped = {e.scaler for e in of_type(events, ScalerStep) if e.scaler in interpreter.scalers}
    # code that only uses a scaler leaves saving to its owner
    owns_scaler = bool(of_type(events, ScalerMade))
    if stepped and owns_scaler and not stepped & interpreter.escaped:
        _check_saved(interpreter, events_by_entry)
        _check_restored(interpreter, events)


def _check_updated(interpreter: Interpreter, events: list[Event]) -> None:
    updated = {e.scaler for e in of_type(events, ScalerUpdate)}
    # another object may have the same scaler, under the same last component of its name
    texts = {last_component(interpreter.scalers[key].text) for key in updated if key in interpreter.scalers}
    scaled = {e.scaler for e in of_type(events, ScalerScale)}
    elsewhere = {
        last_component(text)
        for script in interpreter.linked.scripts
        for text, used in script.usage.methods.items()
        if "update" in used
    }
    for step in of_type(events, ScalerStep):
        key = step.scaler
        scaler = interpreter.scalers.get(key)
        if (
            scaler is None
            or key in updated | interpreter.escaped
            or key not in scaled
            or last_component(scaler.text) in texts - {""}
        ):
            continue
        if last_component(scaler.text) not in elsewhere and ("name " not in key or not updated):
            interpreter.report(
                "AMP804",
                step.node,
                "update() is never called: the scale never changes, and the next unscale_() or step raises",
                f"call {scaler.text or 'scaler'}.update() once, after the step",
                _update_after_fix(step),
            )
        return


def _update_after_fix(step: ScalerStep) -> Fix | None:
    statement, text = step.statement, receiver_name(step.node)
    if (
        not isinstance(statement, ast.Expr)
        or statement.value is not step.node
        or not text
        or not step.optimizer
    ):
        return None
    return Fix.at(statement, "insert after", f"{text}.update()")


def _in_call(event: Event) -> bool:
    """Return whether an event happens in a function that is called from elsewhere."""
    return any(guard.kind == "call" and isinstance(guard.node, ast.Call) for guard in event.guards)


def _check_saved(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    every = [e for events in events_by_entry for e in events]
    saved = {e.scaler for e in of_type(every, ScalerSaved)}
    own_scalers = {scaler.key for scaler in interpreter.scalers.values() if scaler.node is not None}
    stepped = {e.scaler for e in of_type(every, ScalerStep)}
    missing = (stepped & own_scalers) - saved
    if saved and not (saved <= own_scalers and missing):  # the name of an unknown scaler may be another one's
        return
    names = " and ".join(
        sorted(interpreter.scalers[key].text for key in missing if interpreter.scalers[key].text)
    )
    whose = f"that of {names}" if saved and names else "the scaler's"
    resumes = bool(of_type(every, OptimizerRestored))
    for event, events in ((e, entry) for entry in events_by_entry for e in of_type(entry, CheckpointSaved)):
        entries = event.entries
        saved_here = {value.kind for value in entries.items if isinstance(value, StateDict)}
        if "optimizer" in saved_here and (resumes or saved or _has_weights(entries)):
            interpreter.report(
                "AMP820",
                _place_here(event, entries.node),
                f"the checkpoint contains the optimizer's state but not {whose}: "
                "a resumed run starts at a scale that overflows",
                f"save {names if saved and names else 'scaler'}.state_dict() as well",
                None if saved else _save_scaler_fix(interpreter, events, event, entries.node),
            )


def _has_weights(entries: DictLiteral) -> bool:
    """Return whether a checkpoint has the weights of a model, without which no run can resume from it."""
    of_others = sum(calls_method(value, "state_dict") for value in getattr(entries.node, "values", ()))
    has_parameters = any(isinstance(value, Parameters) for value in entries.items)
    return has_parameters or of_others > sum(isinstance(value, StateDict) for value in entries.items)


def _place_here(event: Event, node: ast.AST) -> ast.AST:
    """Return a node or, if it is in an imported file, the call in this file that leads there."""
    calls = (guard.node for guard in reversed(event.guards) if isinstance(guard.node, ast.Call))
    return next((place for place in (node, *calls) if not file_number(place)), node)


def _save_scaler_fix(
    interpreter: Interpreter, events: list[Event], event: Event, node: ast.AST
) -> Fix | None:
    """Return the fix that saves the scaler, if its name is in scope where the checkpoint is written."""
    texts = {scaler.text for scaler in interpreter.scalers.values() if scaler.text}
    if len(texts) != 1 or not isinstance(node, ast.Dict):
        return None
    text = next(iter(texts))
    used_here = any(isinstance(e, ScalerEvent | ScalerStep) and not _in_call(e) for e in events)
    visible = not _in_call(event) and (used_here or text.startswith("self."))
    if not visible or not node.keys or not all(isinstance(key, ast.Constant) for key in node.keys):
        return None
    return Fix.at(node, "add entry", "scaler", f"{text}.state_dict()")


def _check_restored(interpreter: Interpreter, events: list[Event]) -> None:
    if of_type(events, ScalerRestored):
        return
    for event in of_type(events, OptimizerRestored):
        interpreter.report(
            "AMP820",
            _place_here(event, event.node),
            "the optimizer resumes from a checkpoint, but the scaler starts over, at a scale that overflows",
            "restore it as well: scaler.load_state_dict(checkpoint[...])",
        )
