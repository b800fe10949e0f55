"""Loops that step only every few batches: what must be done each time, and what only with the step."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.diagnostic import Event, Guard

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

__all__ = ["check"]

_STEPS = ("scaler.step", "optimizer.step")


def check(interpreter: Interpreter, events: list[Event]) -> None:
    """Unscaling, zeroing, dividing and synchronising in accumulation loops."""
    for loop in dict.fromkeys(e.loop for e in events if e.kind == "backward" and e.loop is not None):
        inside = [e for e in events if any(g.node is loop for g in e.guards)]
        backwards = [e for e in inside if e.kind == "backward" and e.loop is loop]
        steps = [e for e in inside if e.kind in _STEPS]
        if steps and all(e.data["no_sync"] for e in backwards):
            _never_synchronised(interpreter, steps[0])
        gates = _gates(loop, backwards, steps)
        if not gates:
            continue
        _unscaled_each_time(interpreter, loop, inside, gates)
        _zeroed_each_time(interpreter, loop, inside, gates)
        if not any(e.kind in ("gradient.read", "backward.unknown") for e in inside):
            _not_divided(interpreter, backwards)
        _not_delayed(interpreter, inside, backwards)


def _gates(loop: ast.AST, backwards: list[Event], steps: list[Event]) -> set[ast.AST]:
    """The conditions on a count under which all steps stand, and no backward."""
    if not steps or any(_decided(loop, e) for e in backwards):
        return set()
    per_step = [{g.node for g in e.inside(loop) if g.kind == "if" and _counts(g)} for e in steps]
    shared = set.intersection(*per_step)
    return {gate for gate in shared if not any(gate in {g.node for g in e.inside(loop)} for e in backwards)}


def _decided(loop: ast.AST, event: Event) -> bool:
    return any(guard.kind == "if" and _counts(guard) for guard in event.inside(loop))


def _counts(guard: Guard) -> bool:
    """Whether a condition is about a remainder: ``(i + 1) % accumulate == 0``."""
    test = getattr(guard.node, "test", None)
    return test is not None and any(
        isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(test)
    )


def _free(loop: ast.AST, event: Event, gates: set[ast.AST]) -> bool:
    """Whether it happens with every batch."""
    return not any(g.kind == "if" for g in event.inside(loop)) and not gates & {g.node for g in event.guards}


def _unscaled_each_time(
    interpreter: Interpreter, loop: ast.AST, inside: list[Event], gates: set[ast.AST]
) -> None:
    for event in inside:
        if event.kind == "scaler.unscale" and _free(loop, event, gates):
            interpreter.report(
                "AMP810",
                event.node,
                "unscale_() runs with every batch, but the step only with some: the second call raises, and"
                " later batches add scaled gradients to unscaled ones",
                "move it under the condition of the step, before clipping",
            )


def _zeroed_each_time(
    interpreter: Interpreter, loop: ast.AST, inside: list[Event], gates: set[ast.AST]
) -> None:
    for event in inside:
        if event.kind == "zero_grad" and _free(loop, event, gates):
            interpreter.report(
                "AMP831",
                event.node,
                "the gradients are set to zero with every batch, but the step comes only with some: nothing"
                " is accumulated",
                "move zero_grad() under the condition of the step, after it",
            )


def _not_divided(interpreter: Interpreter, backwards: list[Event]) -> None:
    for event in backwards:
        loss = event.data["loss"]
        if loss.loss and loss.divided is False:
            interpreter.report(
                "AMP830",
                event.node,
                "the gradients of several batches are added, and the loss is a mean over one: their sum is"
                " too large by the number of batches",
                "divide the loss by the number of accumulated batches before backward",
            )


def _not_delayed(interpreter: Interpreter, inside: list[Event], backwards: list[Event]) -> None:
    models = [e.data["model"] for e in inside if e.kind == "forward"]
    if not any(model.wrapper == "DistributedDataParallel" for model in models):
        return
    if "no_sync" in interpreter.script.text or "require_backward_grad_sync" in interpreter.script.text:
        return
    for event in backwards:
        interpreter.report(
            "AMP833",
            event.node,
            "the gradients of every batch are sent between the processes, although only some batches step",
            "run the batches that do not step under 'with model.no_sync():'",
        )


def _never_synchronised(interpreter: Interpreter, step: Event) -> None:
    interpreter.report(
        "AMP834",
        step.node,
        "every backward before this step runs under no_sync(): the processes step with different gradients",
        "leave the last backward before a step outside of no_sync()",
    )
