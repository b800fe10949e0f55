"""Places in the flow of a script."""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["EventPlace", "Guard"]


@dataclass(frozen=True, slots=True)
class Guard:
    """A node that decides whether, or how often, a statement runs: ``loop``, ``if``, ``call``."""

    kind: str
    node: ast.AST


@dataclass(frozen=True, slots=True)
class EventPlace:
    """The place of an event.

    Attributes:
        node: Expression.
        guards: Guards around it, outermost first.
        statement: Statement that contains it.
    """

    node: ast.AST
    guards: tuple[Guard, ...]
    statement: ast.stmt | None
