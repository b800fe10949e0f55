"""Rule on graphs that are retained for no later backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.flow.events import AutogradGrad, Backward, Event, UnknownBackward, of_type

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_retained_graphs"]


def check_retained_graphs(interpreter: Interpreter, events: list[Event]) -> None:
    """Check ``retain_graph=True`` where no later backward uses the graph."""
    uses: list[Event] = of_type(events, Backward, UnknownBackward, AutogradGrad)
    for index, event in enumerate(uses):
        if not isinstance(event, Backward) or not event.retains_graph or not event.loss.model_calls:
            continue
        if any(other.loop is event.loop for other in uses[index + 1 :]):
            continue
        interpreter.report(
            "AMP836",
            event.node,
            "retain_graph=True keeps every activation, but no later backward uses this graph",
            "remove retain_graph",
            Fix.at(event.node, "remove keyword", "retain_graph"),
        )
