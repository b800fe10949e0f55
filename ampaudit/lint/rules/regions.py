"""What stands inside an autocast region that should not, and outside that should."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.lint.diagnostic import Event, Fix, position_of
from ampaudit.lint.flow.values import Autocast, Function

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

__all__ = ["check", "check_validation"]

# calls that may stand after the backward without a need for autocast
_AFTERWARDS: Final = frozenset(
    "backward scale step update unscale_ zero_grad clip_grad_norm_ clip_grad_value_ parameters item detach"
    " append get_scale print log info add_scalar set_postfix len str float".split()
)


def check(interpreter: Interpreter, events: list[Event]) -> None:
    """Rules about the regions of one function."""
    late: set[ast.AST | None] = set()
    for event in (e for e in events if e.kind == "backward.inside"):
        context: Autocast = event.data["context"]
        late.add(context.node)
        interpreter.report(
            "AMP840",
            event.node,
            "backward runs inside autocast: its ops follow the dtypes of the forward pass by themselves",
            "end the autocast block after the loss",
            _dedent(events, event, context),
        )
    for event in (e for e in events if e.kind == "step.inside"):
        context = event.data["context"]
        if context.node not in late:
            interpreter.report(
                "AMP841",
                event.node,
                "the optimizer steps inside autocast, which is for the forward pass and the loss",
                "end the autocast block after the loss",
                _dedent(events, event, context),
            )
            late.add(context.node)
    _dropped(interpreter, events)
    _halved(interpreter, events)
    _threads(interpreter, events)


def _dedent(events: list[Event], event: Event, context: Autocast) -> Fix | None:
    """End the block before the statement, if what follows in it needs no autocast."""
    entered = next((e for e in events if e.kind == "autocast.entered" and e.data["value"] is context), None)
    block = entered.data["block"] if entered is not None else None
    if not isinstance(block, ast.With) or len(block.items) != 1 or event.statement not in block.body:
        return None
    index = block.body.index(event.statement)
    tail = block.body[index:]
    calls = [node.func for statement in tail for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
    if not names <= _AFTERWARDS:
        return None
    return Fix.at(block, "end block", str(index))


def _dropped(interpreter: Interpreter, events: list[Event]) -> None:
    for event in (e for e in events if e.kind == "autocast.dropped"):
        interpreter.report(
            "AMP848",
            event.node,
            "this makes an autocast context and does not enter it",
            "write 'with' before it, and the forward pass and the loss in its block",
        )


def _halved(interpreter: Interpreter, events: list[Event]) -> None:
    refused = {place[1:] for place in interpreter.diagnostics if place[0] == "AMP801"}
    for event in (e for e in events if e.kind == "half.autocast"):
        node = event.node
        if position_of(node) not in refused:
            interpreter.report(
                "AMP849",
                node,
                "these parameters are float16, and the model is called under autocast, which wants float32"
                " ones: what autocast would keep in float32 was rounded before",
                "leave out half(): autocast casts what may be cast",
            )


def _threads(interpreter: Interpreter, events: list[Event]) -> None:
    for event in events:
        if event.kind == "thread" and event.data["autocast"].enabled is True:
            target = event.data["target"]
            text = ast.unparse(target.info.node) if isinstance(target, Function) else "autocast"
            if "autocast" not in text and _CALLS_A_MODEL.search(text):
                _not_in_thread(
                    interpreter, event, "autocast is a state of this thread; the new one starts without it"
                )
        elif event.kind == "forward" and event.data["model"].wrapper == "DataParallel":
            autocast: Autocast = event.data["autocast"]
            info = interpreter.script.classes.get(event.data["model"].origin)
            # what is not in this file may enter autocast itself
            unknown = info is None and not event.data["model"].origin.startswith(("torch.", "torchvision."))
            own = unknown or (info is not None and "autocast" in ast.unparse(info.node))
            if autocast.enabled is True and autocast.dtype == "bfloat16" and not own:
                cause = (
                    "DataParallel's threads take over that autocast is on, but not its dtype: the replicas"
                    " run in float16"
                )
                _not_in_thread(interpreter, event, cause)


_CALLS_A_MODEL = re.compile(r"(?:model|net)\w*\(", re.IGNORECASE)


def _not_in_thread(interpreter: Interpreter, event: Event, cause: str) -> None:
    interpreter.report(
        "AMP851", event.node, cause, "enter autocast in what the thread runs: the model's own forward"
    )


def _evaluates_lowered(other: Event, event: Event) -> bool:
    """Whether there is another evaluation of the model that may be under autocast: by a switch, say."""
    if other.kind != "forward" or other.data["model"].key != event.data["model"].key:
        return False
    return "no_grad" in other.data["grad"] and other.data["autocast"].enabled is not False


def check_validation(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    """Validation that runs in another precision than training."""
    trained = {
        event.data["model"].key
        for events in events_by_entry
        if any(e.kind in ("backward", "backward.unknown") for e in events)
        for event in events
        if event.kind == "forward" and event.data["autocast"].enabled is True and not event.data["grad"]
    }
    for event, events in ((e, entry) for entry in events_by_entry for e in entry if e.kind == "forward"):
        off = event.data["autocast"].enabled is False and event.data["autocast"].node is None
        if (
            off
            and event.data["called"]
            and event.data["grad"] == ("no_grad",)
            and event.loop is not None
            and event.data["model"].key in trained
            and not any(_evaluates_lowered(other, event) for other in events)
        ):
            interpreter.report(
                "AMP843",
                event.node,
                "the model is trained under autocast and evaluated in float32: slower, and another model",
                "enter the same autocast here",
            )
