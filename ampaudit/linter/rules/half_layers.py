"""Rule on layers that are made in float16 in a script whose scaler unscales gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, position_of
from ampaudit.linter.flow.events import Event, HalfLayer, ScalerStep, ScalerUnscale, of_type

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_half_layers"]


def check_half_layers(interpreter: Interpreter, events_by_entry: list[list[Event]]) -> None:
    """Check layers that are made with ``dtype=torch.float16``, unless the script freezes parameters."""
    events = [event for events in events_by_entry for event in events]
    steps = [event for event in events if isinstance(event, ScalerUnscale | ScalerStep)]
    if not steps or interpreter.linked.mentions("requires_grad"):
        return
    for event in of_type(events, HalfLayer):
        interpreter.report(
            "AMP801",
            event.node,
            f"these parameters are float16, and the scaler at line {position_of(steps[0].node)[0]} cannot "
            "unscale float16 gradients",
            "make the layer in float32 and let autocast choose the dtype of each op",
            certainty=Certainty.LIKELY,
        )
