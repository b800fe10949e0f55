"""Rule on autocast's weight cache, which outlives an optimizer step inside one long block."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.events import (
    AutocastEntered,
    Backward,
    Event,
    ModelCall,
    StepEvent,
    UnknownBackward,
    of_type,
)
from ampaudit.linter.flow.syntax import has_name

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_cached_without_gradients", "check_weight_cache"]


def check_weight_cache(interpreter: Interpreter, events: list[Event]) -> None:
    """Report steps in a loop inside one autocast block, instead of the milder AMP840 and AMP841.

    Autocast keeps the 16-bit copy of each weight until its outermost block ends (torch,
    ``aten/src/ATen/autocast_mode.cpp``: ``cached_cast`` and ``clear_cache``).
    """
    for event in of_type(events, StepEvent):
        if not event.autocast.is_certain:
            continue
        block = _block_around_loop(event, events)
        if block is None:
            continue
        stale = {id(e.node) for e in events if isinstance(e, StepEvent | Backward) and e.is_inside(block)}
        for key, diagnostic in list(interpreter.diagnostics.items()):
            if key[0] in ("AMP840", "AMP841") and id(diagnostic.node) in stale:
                del interpreter.diagnostics[key]
        interpreter.report(
            "AMP852",
            event.node,
            f"this step is in a loop inside the autocast block of line {block.lineno}, which casts each "
            "weight once and keeps the copy: from the second iteration on, the model computes with the old "
            "weights",
            "enter autocast anew in each iteration, around the forward pass and the loss only",
        )


def check_cached_without_gradients(interpreter: Interpreter, events: list[Event]) -> None:
    """Check that no weights are cast under ``no_grad`` that the same autocast block needs with gradients.

    Fixed by pull request 165068 of pytorch, of December 2025; reported in issues 65766, 105211 and 112583.
    """
    if not any(isinstance(event, Backward | UnknownBackward) for event in events):
        return
    blocks = {id(e.block): e.context for e in of_type(events, AutocastEntered) if e.context.caches}
    calls = of_type(events, ModelCall)
    reported: set[ast.withitem | None] = set()
    for index, event in enumerate(calls):
        if "no_grad" not in event.grad_modes or not event.autocast.is_certain:
            continue
        start = next((i for i, g in enumerate(event.guards) if id(g.node) in blocks), None)
        if start is None:
            continue
        block = _block_without_gradients(event, start)
        if block in reported:
            continue
        same_block = event.guards[: start + 1]
        again = next(
            (
                other
                for other in calls[index + 1 :]
                if _is_same_model(other, event)
                and not other.grad_modes
                and other.guards[: start + 1] == same_block
            ),
            None,
        )
        if again is not None:
            reported.add(block)
            interpreter.report(
                "AMP875",
                event.node if block is None else block.context_expr,
                "autocast keeps the casts of weights that are made here without gradients, and the call at "
                f"line {line_of(again.node)} uses them: in older versions of torch, these get "
                "no gradients",
                "use an autocast block of its own for what needs no gradients, or cache_enabled=False",
                certainty=Certainty.LIKELY,
            )


def _block_without_gradients(event: Event, start: int) -> ast.withitem | None:
    """Return the ``no_grad`` inside the autocast block that a call is in; None is for a decorator."""
    items = [item for g in event.guards[start + 1 :] if isinstance(g.node, ast.With) for item in g.node.items]
    return next((i for i in items if has_name(i.context_expr, "no_grad")), None)


def _is_same_model(one: ModelCall, other: ModelCall) -> bool:
    """Return whether two calls are of one model; the name of one from elsewhere may stand for several."""
    is_one = one.model.node is not None or one.callee == other.callee
    return one.model.key == other.model.key and is_one


def _block_around_loop(step: Event, events: list[Event]) -> ast.With | None:
    """Return the autocast block around a loop that computes a loss and steps."""
    contexts = {id(e.block): e.context for e in of_type(events, AutocastEntered)}
    for index, guard in enumerate(step.guards):
        context = contexts.get(id(guard.node)) if guard.kind == "with" else None
        if context is None or not isinstance(guard.node, ast.With):
            continue
        loops = [g.node for g in step.guards[index + 1 :] if g.kind == "loop"]
        computes = any(
            g.node in loops
            for e in of_type(events, Backward)
            if e.loss.computed_under != "" or e.is_inside(guard.node)
            for g in e.guards
            if g.kind == "loop"
        )
        return guard.node if context.caches and context.enabled is True and computes else None
    return None
