"""Graphs that are kept longer than they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Event, Fix

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

__all__ = ["check"]

_WALKS = ("backward", "backward.unknown", "autograd.grad")


def check(interpreter: Interpreter, events: list[Event]) -> None:
    """``retain_graph=True`` where nothing goes through the graph again."""
    walks = [event for event in events if event.kind in _WALKS]
    for index, event in enumerate(walks):
        if event.kind != "backward" or not event.data["retain"] or not event.data["loss"].model_calls:
            continue
        later = [other for other in walks[index + 1 :] if other.loop is event.loop]
        if later:
            continue
        node = event.node
        interpreter.report(
            "AMP836",
            node,
            "retain_graph=True keeps every activation, and no backward goes through this graph again",
            "leave retain_graph out",
            Fix.at(node, "remove keyword", "retain_graph"),
        )
