"""Diagnostics of a script, and the fixes that resolve them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

__all__ = [
    "LINES_PER_FILE",
    "Applicability",
    "Certainty",
    "Diagnostic",
    "Fix",
    "file_number",
    "key_of",
    "position_of",
    "remove_statement",
]

LINES_PER_FILE: Final = 1 << 24  # the lines of imported file n are counted from n times this


def file_number(node: ast.AST) -> int:
    """Return the number of the imported file that a node is in; zero for the script itself."""
    return int(getattr(node, "lineno", 0)) // LINES_PER_FILE


def position_of(node: ast.AST) -> tuple[int, int]:
    """Return a node's line, from 1, and column in UTF-8 bytes, from 0; zeros for a node without position."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def key_of(node: ast.AST) -> str:
    """Return the key of the object that an expression creates."""
    line, column = position_of(node)
    return f"L{line}:{column}"


class Certainty(IntEnum):
    """How certain a fact is: what is likely gives warnings at most, what is unknown gives nothing."""

    UNKNOWN = 0
    LIKELY = 1
    KNOWN = 2


class Applicability(Enum):
    """Whether a fix is applied by ``--fix``, only with ``--unsafe-fixes``, or not at all."""

    NONE = 0
    UNSAFE = 1
    SAFE = 2


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of the source that resolves a diagnostic, as data; ``lint.fixes`` applies it.

    Attributes:
        kind: name of the change, such as ``insert before``.
        line: line of the node to change, from 1.
        column: its column in UTF-8 bytes, from 0, as ``ast`` counts.
        details: arguments of the change; for ``replace expression`` the new code, and line and column
            (in characters) of the old expression's end.
        is_safe: whether what it writes certainly works there.
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
class Diagnostic:
    """One mistake in a script.

    Attributes:
        code: code of the rule.
        node: where it is.
        cause: what is wrong, in one sentence.
        advice: what to write instead.
        fix: a change that resolves it, if there is one.
        certainty: whether it is known or likely.
    """

    code: str
    node: ast.AST
    cause: str
    advice: str
    fix: Fix | None = None
    certainty: Certainty = Certainty.KNOWN
