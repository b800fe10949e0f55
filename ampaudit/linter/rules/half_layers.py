"""Rule on layers that are made in float16 in a script whose scaler unscales gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, Diagnostic, position_of
from ampaudit.linter.flow.events import Event, HalfLayer, ScalerStep, ScalerUnscale, of_type
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, keyword_value
from ampaudit.linter.flow.torch_names import DTYPES, MAKES_TENSORS, canonical_name

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_half_accumulators", "check_half_layers"]


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


def check_half_accumulators(script: Script) -> Iterator[Diagnostic]:
    """Report tensors that are made in 16 bits and to which a later line adds again and again."""
    if "float16" not in script.text and "half" not in script.text:
        return
    dtypes = {item.name: dtype for item in script.assignments if (dtype := _dtype(script, item.value))}
    for node in script.nodes() if dtypes else ():
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
            continue
        if isinstance(node.target, ast.Subscript) and any(
            isinstance(part, ast.Slice) for part in ast.walk(node.target.slice)
        ):
            continue  # a region, of which each element may get few numbers
        name = dotted_name(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
        if name in dtypes:
            largest = "256" if dtypes[name] == "bfloat16" else "2048"
            yield Diagnostic(
                "AMP873",
                node,
                f"this total is {dtypes[name]} and rounded at each addition: above {largest} times what is "
                "added, it stands still",
                "keep the total in float32",
                certainty=Certainty.LIKELY,
            )


def _dtype(script: Script, value: ast.expr) -> str:
    """Return the 16-bit dtype in which ``torch.zeros`` and the like make a tensor; empty otherwise."""
    function = dotted_name(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or function not in MAKES_TENSORS:
        return ""
    dtype_argument = keyword_value(value, "dtype")
    name = "" if dtype_argument is None else dotted_name(dtype_argument)
    values = script.assigned.get(name, [])
    name = dotted_name(values[0]) if len(values) == 1 else name
    dtype = DTYPES.get(canonical_name(name), "")
    return dtype if dtype in ("float16", "bfloat16") else ""
