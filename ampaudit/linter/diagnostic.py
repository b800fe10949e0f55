"""Diagnostics of a script, and the fixes that resolve them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

LINES_PER_FILE: Final = 1 << 24  # the lines of imported file n are counted from n times this


def line_of(node: ast.AST) -> int:
    """Return a node's line, from 1; zero for a node without position."""
    return getattr(node, "lineno", 0)


def file_number(node: ast.AST) -> int:
    """Return the number of the imported file that a node is in; zero for the script itself."""
    return line_of(node) // LINES_PER_FILE


def position_of(node: ast.AST) -> tuple[int, int]:
    """Return a node's line, from 1, and column in UTF-8 bytes, from 0; zeros for a node without position."""
    return line_of(node), getattr(node, "col_offset", 0)


def key_of(node: ast.AST) -> str:
    """Return the key of the object that an expression creates."""
    line, column = position_of(node)
    return f"L{line}:{column}"


class Certainty(IntEnum):
    """Certainty of a fact: a likely mistake is at most a warning, and an unknown one is not reported."""

    UNKNOWN = 0
    LIKELY = 1
    KNOWN = 2


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of the source that resolves a diagnostic, as data; ``linter.fixes`` applies it.

    Attributes:
        kind: Name of the change, such as ``insert before``.
        line: Line of the node to change, from 1.
        column: Column of the node in UTF-8 bytes, from 0, as ``ast`` counts.
        details: Arguments of the change; for ``replace expression`` the new code, and line and column
            (in characters) of the old expression's end.
        is_safe: Whether ``--fix`` applies it; if not, ``--unsafe-fixes`` does.
    """

    kind: str
    line: int
    column: int
    details: tuple[str, ...] = ()
    is_safe: bool = True

    @classmethod
    def at(cls, node: ast.AST, kind: str, *details: str) -> Fix:
        """Create a fix that changes a node."""
        return cls(kind, *position_of(node), details)


def remove_statement(statement: ast.stmt | None, node: ast.AST) -> Fix | None:
    """Return the fix that removes a statement which consists of one expression only."""
    alone = isinstance(statement, ast.Expr) and statement.value is node
    return Fix.at(node, "remove statement") if alone else None


@dataclass(frozen=True, slots=True)
class Mistake:
    """What a rule says of one place.

    Attributes:
        node: Node at which to report it.
        cause: Description of the mistake in one sentence.
        advice: Remedy.
        fix: Change that resolves it, if there is one.
        certainty: Certainty of the mistake.
        code: Code of the rule, where it is reported.
    """

    node: ast.AST
    cause: str
    advice: str
    fix: Fix | None = None
    certainty: Certainty = Certainty.KNOWN
    code: str = field(default="", kw_only=True)
