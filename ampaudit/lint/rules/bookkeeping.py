"""What must be done once, somewhere: update, save, restore; and what is done too often."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Event, Fix
from ampaudit.lint.flow.script import dotted_name
from ampaudit.lint.flow.values import MAYBE, UNSCALED, DictLiteral, StateDict, Tensor

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

__all__ = ["check_loops", "check_updates_and_checkpoints"]


def check_loops(interpreter: Interpreter, events: list[Event]) -> None:
    """Rules about the loops of one function."""
    _made_in_loop(interpreter, events)
    _scheduler(interpreter, events)
    for event in events:
        if event.kind == "item":
            _number(interpreter, events, event)


def _made_in_loop(interpreter: Interpreter, events: list[Event]) -> None:
    for made in (event for event in events if event.kind == "scaler.made"):
        # of a loop around a call of the function that makes it, nothing is said: each call may be another run
        own = [i for i, guard in enumerate(made.guards) if isinstance(guard.node, ast.Call)]
        for guard in made.guards[own[-1] if own else 0 :]:
            if guard.kind != "loop":
                continue
            inside = {event.kind for event in events if any(g.node is guard.node for g in event.guards)}
            if inside & {"backward", "scaler.scale"} and "optimizer.made" not in inside:
                interpreter.report(
                    "AMP814",
                    made.node,
                    "a new scaler in every round forgets the scale it found, and starts at 65,536 again",
                    "make the scaler once, before the loop",
                )


def _scheduler(interpreter: Interpreter, events: list[Event]) -> None:
    steps = [event for event in events if event.kind == "scaler.step"]
    for event in (event for event in events if event.kind == "scheduler.step"):
        loop = event.loop
        beside = [step for step in steps if loop is not None and step.loop is loop]
        checked = any(e.kind == "scaler.get_scale" and e.loop is loop for e in events)
        if not beside or checked or loop is None:
            continue
        if _as_often(event, beside[0], loop):
            interpreter.report(
                "AMP822",
                event.node,
                "the schedule goes on although the scaler may have skipped the optimizer's step",
                "step it only if the scale did not fall: scale = scaler.get_scale(); scaler.update(); if"
                " scaler.get_scale() >= scale: scheduler.step()",
            )


def _number(interpreter: Interpreter, events: list[Event], event: Event) -> None:
    value: Tensor = event.data["value"]
    if value.scaler_key not in (UNSCALED, MAYBE):
        interpreter.report(
            "AMP823",
            event.node,
            "this number has the loss scale as a factor, which changes while the model trains",
            "take the number of the loss before it is scaled",
        )
        return
    loop = event.loop
    mixed = bool(interpreter.scalers) or any(e.kind == "autocast.entered" for e in events)
    beside = [e for e in events if e.kind == "backward" and loop is not None and e.loop is loop]
    if not mixed or not beside or loop is None or not (value.loss or value.model_calls):
        return
    if _as_often(event, beside[0], loop):
        interpreter.report(
            "AMP863",
            event.node,
            "every step waits here until the GPU has finished",
            "add up loss.detach() on the device, and take the number when it is logged",
        )


def _as_often(event: Event, other: Event, loop: ast.AST) -> bool:
    """Whether something happens in every round of a loop in which something else does."""
    allowed = {guard.node for guard in other.inside(loop)}
    return all(guard.node in allowed or guard.kind in ("with", "call") for guard in event.inside(loop))


def check_updates_and_checkpoints(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    """Rules about a whole file."""
    events = [event for events in events_by_entry for event in events]
    _never_updated(interpreter, events)
    stepped = {e.data["scaler"] for e in events if e.kind == "scaler.step"}
    # who only uses a scaler leaves it to its maker to save it
    made = any(e.kind == "scaler.made" for e in events)
    if stepped and made and not stepped & interpreter.escaped:
        _not_saved(interpreter, events_by_entry)
        _not_restored(interpreter, events)


def _never_updated(interpreter: Interpreter, events: list[Event]) -> None:
    updated = {e.data["scaler"] for e in events if e.kind == "scaler.update"}
    texts = {_last(interpreter.scalers[key].text) for key in updated if key in interpreter.scalers}
    for step in (e for e in events if e.kind == "scaler.step"):
        key = step.data["scaler"]
        scaler = interpreter.scalers.get(key)
        scaled = any(e.kind == "scaler.scale" and e.data["scaler"] == key for e in events)
        if (
            scaler is None
            or key in updated | interpreter.escaped
            or not scaled
            or _last(scaler.text) in texts - {""}
        ):
            continue
        elsewhere = any(
            "update" in used and _last(text) == _last(scaler.text)
            for text, used in interpreter.script.usage.methods.items()
        )
        if not elsewhere and ("name " not in key or not updated):
            interpreter.report(
                "AMP804",
                step.node,
                "update() is never called: after an overflow the scale stays as it is, and unscale_() or the"
                " next step raises",
                f"call {scaler.text or 'scaler'}.update() once, after the step",
                _update_after(step),
            )
        return


def _last(text: str) -> str:
    """What a scaler is called, whatever object holds it: somebody else may hold the same."""
    return text.rpartition(".")[2]


def _update_after(step: Event) -> Fix | None:
    statement, node = step.statement, step.node
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    text = dotted_name(node.func.value) if called and isinstance(node.func, ast.Attribute) else ""  # type: ignore[attr-defined]
    alone = isinstance(statement, ast.Expr) and statement.value is step.node
    if not alone or not text or not step.data["optimizer"] or statement is None:
        return None
    return Fix.at(statement, "insert after", f"{text}.update()")


def _in_call(event: Event) -> bool:
    """Whether it happens in a function that another one calls."""
    return any(guard.kind == "call" and isinstance(guard.node, ast.Call) for guard in event.guards)


def _states(entries: DictLiteral) -> set[str]:
    return {value.kind for value in entries.items if isinstance(value, StateDict)}


def _not_saved(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    if any(e.kind == "scaler.state_dict" for events in events_by_entry for e in events):
        return
    for event, events in ((e, entry) for entry in events_by_entry for e in entry if e.kind == "save"):
        entries: DictLiteral = event.data["entries"]
        if "optimizer" in _states(entries):
            interpreter.report(
                "AMP820",
                entries.node,
                "the checkpoint holds the optimizer's state and not the scaler's: a run that goes on from it"
                " starts at a scale that overflows",
                "save scaler.state_dict(), too",
                _save_it(interpreter, events, event, entries.node),
            )


def _save_it(interpreter: Interpreter, events: list[Event], event: Event, node: ast.AST) -> Fix | None:
    """With the scaler's name, if it is visible where the checkpoint is written."""
    texts = {scaler.text for scaler in interpreter.scalers.values() if scaler.text}
    if len(texts) != 1 or not isinstance(node, ast.Dict):
        return None
    text = next(iter(texts))
    used_here = any(e.kind.startswith("scaler.") and not _in_call(e) for e in events)
    visible = not _in_call(event) and (used_here or text.startswith("self."))
    if not visible or not all(isinstance(key, ast.Constant) for key in node.keys):
        return None
    return Fix.at(node, "add entry", "scaler", f"{text}.state_dict()")


def _not_restored(interpreter: Interpreter, events: list[Event]) -> None:
    kinds = {e.kind for e in events}
    if "scaler.load_state_dict" in kinds:
        return
    for event in (e for e in events if e.kind == "optimizer.load_state_dict"):
        interpreter.report(
            "AMP821",
            event.node,
            "the optimizer goes on from a checkpoint, and the scaler starts anew, at a scale that overflows",
            "restore it, too: scaler.load_state_dict(checkpoint[...])",
        )
