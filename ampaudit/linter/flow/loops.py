"""Executes loops: twice, or once for each of a few known objects."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.linter.flow.definitions import Instance
from ampaudit.linter.flow.joining import item_of
from ampaudit.linter.flow.state import LoopExits, State, join
from ampaudit.linter.flow.values import (
    UNKNOWN,
    KnownItems,
    Model,
    Optimizer,
    Scaler,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["execute_break", "execute_continue", "execute_for", "execute_while"]


def _repeat(interpreter: Interpreter, node: ast.For | ast.AsyncFor | ast.While, item: Value | None) -> None:
    """Execute the body twice, so that the state after one iteration meets the next."""
    entry = interpreter.state.copy()
    breaks: list[State] = []
    for again in range(2):
        interpreter.repetitions += again
        before = interpreter.state.copy()
        if isinstance(node, ast.For | ast.AsyncFor):
            interpreter.assign_item(node.target, item if item is not None else UNKNOWN)
        else:
            interpreter.evaluate(node.test)
        loop = LoopExits()
        interpreter.loops.append(loop)
        with interpreter.guarded("loop", node):
            interpreter.execute(node.body)
        interpreter.loops.pop()
        interpreter.repetitions -= again
        breaks += loop.breaks
        after = interpreter.path_state
        for state in loop.continues:
            after = join(after, state)
        interpreter.path_state = after
        if after is None or after.equals(before):
            break
    for state in breaks:
        interpreter.path_state = join(interpreter.path_state, state)
    if interpreter.path_state is None:  # every path leaves the function; but the loop may not run at all
        interpreter.path_state = entry
    interpreter.execute(node.orelse)


def execute_for(interpreter: Interpreter, node: ast.For | ast.AsyncFor) -> None:
    """Execute a ``for`` loop."""
    items = interpreter.evaluate(node.iter)
    if isinstance(items, KnownItems) and not items.repeated and _are_objects(items) and not node.orelse:
        _unroll(interpreter, node, items)
    else:
        _repeat(interpreter, node, item_of(items))


def _are_objects(items: KnownItems) -> bool:
    """Return whether some items are a few objects, each of which is known."""
    kinds = (Optimizer, Model, Scaler, Instance)
    return 0 < len(items.items) <= _MAX_UNROLLED and all(isinstance(item, kinds) for item in items.items)


_MAX_UNROLLED: Final = 4


def _unroll(interpreter: Interpreter, node: ast.For | ast.AsyncFor, items: KnownItems) -> None:
    """Execute the body once for each item."""
    breaks: list[State] = []
    for item in items.items:
        if interpreter.path_state is None:
            break
        interpreter.assign(node.target, item)
        loop = LoopExits()
        interpreter.loops.append(loop)
        interpreter.execute(node.body)
        interpreter.loops.pop()
        breaks += loop.breaks
        for state in loop.continues:
            interpreter.path_state = join(interpreter.path_state, state)
    for state in breaks:
        interpreter.path_state = join(interpreter.path_state, state)


def execute_while(interpreter: Interpreter, node: ast.While) -> None:
    """Execute a ``while`` loop."""
    _repeat(interpreter, node, None)


def execute_break(interpreter: Interpreter, node: ast.Break) -> None:
    """Leave the innermost loop."""
    del node
    if interpreter.loops:
        interpreter.loops[-1].breaks.append(interpreter.state)
    interpreter.path_state = None


def execute_continue(interpreter: Interpreter, node: ast.Continue) -> None:
    """Go on with the next iteration."""
    del node
    if interpreter.loops:
        interpreter.loops[-1].continues.append(interpreter.state)
    interpreter.path_state = None
