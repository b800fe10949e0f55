"""What the reading of a script yields: findings, repairs, and events in the order they happen."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Diagnostic", "Event", "Fix", "Guard", "position_of", "removal"]


def position_of(node: ast.AST) -> tuple[int, int]:
    """Line from 1 and column in UTF-8 bytes from 0; zeros for what stands nowhere."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of the text that cures a finding, as data: ``lint.repairs`` knows how to make it.

    Attributes:
        kind: which repair.
        line: of the node that it changes, from 1.
        column: in UTF-8 bytes, from 0, as ``ast`` counts.
        details: what the repair has to know; for ``replace expression`` the new code, and line and column
            (in characters) of the old one's end.
    """

    kind: str
    line: int
    column: int
    details: tuple[str, ...] = ()

    @classmethod
    def at(cls, node: ast.AST, kind: str, *details: str) -> Fix:
        """Create the fix of a kind that changes a node."""
        return cls(kind, *position_of(node), details)


def removal(statement: ast.stmt | None, node: ast.AST) -> Fix | None:
    """Takes a statement out that is a node and nothing else."""
    alone = isinstance(statement, ast.Expr) and statement.value is node
    return Fix.at(node, "remove statement") if alone else None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake.

    Attributes:
        code: of its page.
        node: where.
        cause: what is wrong here, in one sentence.
        advice: what to write instead.
        fix: the change that cures it, if one is safe.
    """

    code: str
    node: ast.AST
    cause: str
    advice: str
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """Something that decides whether, or how often, a statement runs: ``loop``, ``if``, ``call``."""

    kind: str
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to scalers, optimizers, gradients.

    Attributes:
        kind: such as ``backward`` or ``scaler.step``.
        node: the expression.
        guards: what encloses it, the outermost first.
        statement: the statement it is in.
        data: what else is known, by name.
    """

    kind: str
    node: ast.AST
    guards: tuple[Guard, ...]
    statement: ast.stmt | None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def loop(self) -> ast.AST | None:
        """The innermost loop."""
        return next((guard.node for guard in reversed(self.guards) if guard.kind == "loop"), None)

    def inside(self, loop: ast.AST) -> tuple[Guard, ...]:
        """The guards between a loop and the event; all of them if it is not in that loop."""
        for index, guard in enumerate(self.guards):
            if guard.node is loop and guard.kind == "loop":
                return self.guards[index + 1 :]
        return self.guards
