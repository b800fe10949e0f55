"""Defines the blocks of a document before it has a format: lines, tables, facts and sections.

A line escapes what is not safe to print; a style is a few words of rich's, such as ``bold red``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampaudit.core.text import escape_control

__all__ = [
    "Block",
    "Facts",
    "Indented",
    "Labelled",
    "Line",
    "Rows",
    "Section",
    "Table",
    "facts",
    "headline",
    "line",
    "tabulate",
]


@dataclass(frozen=True, slots=True)
class Line:
    """A text in styled pieces; ``wrap`` is false for code and for lines that editors parse."""

    pieces: tuple[tuple[str, str], ...] = ()
    wrap: bool = True

    def __post_init__(self) -> None:
        """Escape what is not safe to print: names and notes of a report come from anywhere."""
        safe = tuple((escape_control(text), style) for text, style in self.pieces)
        object.__setattr__(self, "pieces", safe)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        heads: of the columns.
        rows: of as many cells.
        left: indices of the columns that are set flush left.
        width: of the first column at least, in characters.
        fold: whether text too wide for its column is wrapped; otherwise columns go on below the others.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    left: frozenset[int] = frozenset({0})
    width: int | None = None
    fold: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """Rows of a bold label and texts, for one thing or several side by side."""

    rows: tuple[tuple[Line, ...], ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Rows of a label and the blocks beside it."""

    rows: tuple[tuple[Line, tuple[Block, ...]], ...]


@dataclass(frozen=True, slots=True)
class Indented:
    """Blocks indented by a number of characters."""

    blocks: tuple[Block, ...]
    by: int


Block: TypeAlias = "Line | Table | Facts | Labelled | Indented"


@dataclass(frozen=True, slots=True)
class Section:
    """A group of blocks.

    Attributes:
        blocks: in order.
        title: above them, if there is one.
        style: of a title that is a plain text.
        level: 2 for a heading of the document, 3 for a title within it.
    """

    blocks: tuple[Block, ...]
    title: str | Line = ""
    style: str = "bold"
    level: int = 3

    @property
    def heading(self) -> Line:
        """Make a styled title."""
        return line(self.title, style=self.style) if isinstance(self.title, str) else self.title


Piece: TypeAlias = "str | tuple[str, str]"
Rows: TypeAlias = Iterable[Sequence["str | Line"]]


def line(*pieces: Piece, style: str = "", wrap: bool = True) -> Line:
    """Make a line of pieces; those without a style of their own have ``style``."""
    return Line(tuple((p, style) if isinstance(p, str) else p for p in pieces), wrap)


def _lines(rows: Rows) -> tuple[tuple[Line, ...], ...]:
    return tuple(tuple(line(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)


def tabulate(
    heads: Sequence[str], rows: Rows, *, left: Collection[str] = (), width: int | None = None
) -> Table:
    """Make a table; columns are right-aligned, except the first and those named in ``left``."""
    flush = frozenset(index for index, head in enumerate(heads) if index == 0 or head in left)
    return Table(tuple(heads), _lines(rows), flush, width)


def headline(version: str, said: str) -> Section:
    """Make the first line of a report."""
    return Section((line(("ampaudit ", "bold"), (version, "bold"), f"  {said}"),))


def facts(rows: Rows) -> Facts:
    """Make rows of labels and texts."""
    return Facts(_lines(rows))
