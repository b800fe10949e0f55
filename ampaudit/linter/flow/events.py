"""Events of a training loop in the order they happen, for rules that look at a whole loop or file."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Guard", "of_kind"]


@dataclass(frozen=True, slots=True)
class Guard:
    """A node that decides whether, or how often, a statement runs: ``loop``, ``if``, ``call``."""

    kind: str
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a scaler, an optimizer, a model or gradients.

    Attributes:
        kind: such as ``backward`` or ``scaler.step``.
        node: the expression.
        guards: the guards around it, outermost first.
        statement: the statement that contains it.
        data: further facts by name.
    """

    kind: str
    node: ast.AST
    guards: tuple[Guard, ...]
    statement: ast.stmt | None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def loop(self) -> ast.AST | None:
        """The innermost loop around the event."""
        return next((guard.node for guard in reversed(self.guards) if guard.kind == "loop"), None)

    def guards_inside(self, loop: ast.AST) -> tuple[Guard, ...]:
        """Return the guards between a loop and the event; all guards if the event is not in that loop."""
        for index, guard in enumerate(self.guards):
            if guard.node is loop and guard.kind == "loop":
                return self.guards[index + 1 :]
        return self.guards


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """Return the events of some kinds, in order."""
    return [event for event in events if event.kind in kinds]
