"""Rule on accumulation under DDP: the batch that steps must be the one that synchronizes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ampaudit.linter.flow.events import Event, StepEvent, of_type

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_synchronized_batch"]


@dataclass(frozen=True, slots=True)
class _Remainder:
    """A condition such as ``(i + 1) % n == 0``: whether ``i`` leaves a remainder when it is divided by ``n``.

    Attributes:
        count: Dividend, without its offset, and divisor, as text.
        value: Remainder of the count itself, less the offset.
        is_equal: Whether the condition holds for this remainder only, instead of for all others.
    """

    count: tuple[str, str]
    value: int
    is_equal: bool


def check_synchronized_batch(interpreter: Interpreter, events: list[Event]) -> None:
    """Check loops in which ``no_sync()`` and the step follow one count, but not the same remainder of it."""
    for step in of_type(events, StepEvent):
        if step.loop is None:
            continue
        tests = [g.node.test for g in step.guards_inside(step.loop) if isinstance(g.node, ast.If)]
        steps = [remainder for test in tests if (remainder := _remainder_of(test)) is not None]
        if len(steps) != 1 or not steps[0].is_equal:
            continue
        for node, unsynchronized in _conditions_of_no_sync(step.loop):
            same_count = unsynchronized.count == steps[0].count
            if same_count and unsynchronized.is_equal == (unsynchronized.value == steps[0].value):
                interpreter.report(
                    "AMP866",
                    node,
                    f"the batch that steps, at line {step.node.lineno}, runs under no_sync(): "  # type: ignore[attr-defined]
                    "its gradients are not averaged, so the processes step apart",
                    "leave no_sync() for the batch that steps: test the same remainder as its condition",
                )


def _conditions_of_no_sync(loop: ast.AST) -> list[tuple[ast.AST, _Remainder]]:
    """Return the conditions under which a loop chooses ``no_sync``, with what they test."""
    conditions: list[tuple[ast.AST, _Remainder]] = []
    for node in ast.walk(loop):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        in_body, in_orelse = _names_no_sync(node.body), _names_no_sync(node.orelse)
        tested = _remainder_of(node.test)
        if tested is not None and in_body != in_orelse:
            is_equal = tested.is_equal == in_body
            conditions.append((node, replace(tested, is_equal=is_equal)))
    return conditions


def _names_no_sync(code: ast.AST | list[ast.stmt]) -> bool:
    nodes = (n for part in (code if isinstance(code, list) else [code]) for n in ast.walk(part))
    return any(isinstance(node, ast.Attribute) and node.attr == "no_sync" for node in nodes)


def _remainder_of(test: ast.expr) -> _Remainder | None:
    """Return what a comparison of a remainder with a number tests; ``None`` for other conditions."""
    if isinstance(test, ast.BoolOp):  # as in ``n > 1 and (i + 1) % n != 0``
        parts = [remainder for part in test.values if (remainder := _remainder_of(part)) is not None]
        return parts[0] if len(parts) == 1 and isinstance(test.op, ast.And) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right = test.left, test.comparators[0]
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod):
        return None
    if not isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return None
    count, offset = _without_offset(left.left)
    value = _relative_to(right, ast.unparse(left.right))
    if value is None:
        return None
    texts = (ast.unparse(count), ast.unparse(left.right))
    return _Remainder(texts, value - offset, isinstance(test.ops[0], ast.Eq))


def _without_offset(count: ast.expr) -> tuple[ast.expr, int]:
    """Return ``i`` and 1 for ``i + 1``."""
    if isinstance(count, ast.BinOp) and isinstance(count.op, ast.Add | ast.Sub):
        offset = count.right.value if isinstance(count.right, ast.Constant) else None
        if isinstance(offset, int):
            return count.left, offset if isinstance(count.op, ast.Add) else -offset
    return count, 0


def _relative_to(value: ast.expr, divisor: str) -> int | None:
    """Return a remainder as a number; ``n - 1`` is -1 where ``n`` is the divisor."""
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return value.value
    whole, offset = _without_offset(value)
    return offset if ast.unparse(whole) == divisor else None
