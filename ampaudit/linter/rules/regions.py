"""Rules on code that should not run inside autocast, and on code that should."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, Fix, line_of
from ampaudit.linter.flow.events import (
    AutocastEntered,
    Backward,
    Event,
    LossInside,
    ModelCall,
    ScalerScale,
    StepEvent,
    UnknownBackward,
    of_type,
)
from ampaudit.linter.flow.syntax import has_name, simple_name
from ampaudit.linter.flow.values import Autocast

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_cached_without_gradients", "check_regions", "check_weight_cache"]


# calls after the backward that need no autocast
_NEEDS_NO_AUTOCAST: Final = frozenset(
    "backward scale step update unscale_ zero_grad clip_grad_norm_ clip_grad_value_ parameters item detach"
    " append get_scale print log info add_scalar set_postfix len str float".split()
)


def check_regions(interpreter: Interpreter, events: list[Event]) -> None:
    """Check the autocast blocks of one entry point."""
    late: set[ast.AST | None] = set()
    for event in of_type(events, Backward):
        context = event.autocast
        if not context.is_certain:
            continue
        late.add(context.node)
        interpreter.report(
            "AMP840",
            event.node,
            "backward runs inside autocast, although its ops follow the dtypes of the forward pass anyway",
            "end the autocast block after the loss",
            _end_block_fix(events, event, context),
        )
    for step in of_type(events, StepEvent):
        context = step.autocast
        if context.is_certain and context.node not in late:
            interpreter.report(
                "AMP840",
                step.node,
                "the optimizer steps inside autocast, which is for the forward pass and the loss",
                "end the autocast block after the loss",
                _end_block_fix(events, step, context),
            )
            late.add(context.node)
    _check_scaler_device(interpreter, events)
    _check_model_outside(interpreter, events)


def _end_block_fix(events: list[Event], event: Event, context: Autocast) -> Fix | None:
    """Return the fix that ends the block before a statement, if what follows needs no autocast."""
    entered = next((e for e in of_type(events, AutocastEntered) if e.context is context), None)
    block = entered.block if entered is not None else None
    if not isinstance(block, ast.With) or len(block.items) != 1 or event.statement not in block.body:
        return None
    index = block.body.index(event.statement)
    tail = block.body[index:]
    nodes = [node for statement in tail for node in ast.walk(statement)]
    calls = {simple_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    casts = any(isinstance(node, ast.MatMult | ast.Pow) for node in nodes)  # operators that autocast casts
    return Fix.at(block, "end block", str(index)) if calls <= _NEEDS_NO_AUTOCAST and not casts else None


def _check_model_outside(interpreter: Interpreter, events: list[Event]) -> None:
    """Report models that are called outside autocast although the loss of their output is inside."""
    forwards = of_type(events, ModelCall)
    if any(e.autocast.enabled is not False for e in forwards):
        return
    for loss in of_type(events, LossInside):
        for event in forwards:
            info = interpreter.script.classes.get(event.model.origin)
            enters_autocast = info is not None and "autocast" in ast.unparse(info.node)
            if not enters_autocast and id(event.node) in loss.outputs:
                interpreter.report(
                    "AMP854",
                    event.node,
                    f"the model is called outside autocast, and only the loss of its output, at line"
                    f" {line_of(loss.node)}, inside: it runs in float32",
                    "begin the autocast block before the model is called",
                )


def _check_scaler_device(interpreter: Interpreter, events: list[Event]) -> None:
    """Report a scaler for another device than the one that all autocast blocks are for."""
    entered = [e.context for e in of_type(events, AutocastEntered)]
    devices = {context.device for context in entered if context.enabled is not False}
    for event in of_type(events, ScalerScale) if not interpreter.assumptions else ():
        scaler = interpreter.scalers.get(event.scaler)
        if scaler is None or scaler.node is None or not scaler.device or len(devices) != 1:
            continue
        (device,) = devices
        if device is not None and device != scaler.device:
            interpreter.report(
                "AMP847",
                scaler.node,
                f"this scaler is for {scaler.device}, but autocast is for {device}: where there is no"
                f" {scaler.device}, the scaler switches itself off",
                f'create it with torch.amp.GradScaler("{device}")',
            )


def check_weight_cache(interpreter: Interpreter, events: list[Event]) -> None:
    """Report steps in a loop inside one autocast block, instead of the milder AMP840.

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
            if key[0] == "AMP840" and id(diagnostic.node) in stale:
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
