"""Defines the blocks that all formats render: lines, tables, facts and sections.

Lines escape control characters; a style is a rich style such as ``bold red``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampaudit.core.text import escape_control


@dataclass(frozen=True, slots=True)
class Line:
    """A text in styled pieces; ``wrap`` is false for code and for lines that editors parse."""

    pieces: tuple[tuple[str, str], ...] = ()
    wrap: bool = True

    def __post_init__(self) -> None:
        """Escape control characters: names and notes in a report are untrusted."""
        safe = tuple((escape_control(text), style) for text, style in self.pieces)
        object.__setattr__(self, "pieces", safe)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        heads: Headings of the columns.
        rows: Cells, one per column.
        left: Indices of the left-aligned columns.
        width: Minimum width of the first column in characters.
        fold: Whether wide text is wrapped within its column; otherwise columns that do not fit continue
            below the others.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    left: frozenset[int] = frozenset({0})
    width: int | None = None
    fold: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """Rows of a bold label and one or more columns of text."""

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
        blocks: Content, in order.
        title: Heading; empty for none.
        style: Style of a title that is a string.
        level: Heading level: 2 in the document, 3 within a part of it.
    """

    blocks: tuple[Block, ...]
    title: str | Line = ""
    style: str = "bold"
    level: int = 3

    @property
    def heading(self) -> Line:
        """The title with its style."""
        return line(self.title, style=self.style) if isinstance(self.title, str) else self.title


Piece: TypeAlias = "str | tuple[str, str]"
Rows: TypeAlias = Iterable[Sequence["str | Line"]]


def line(*pieces: Piece, style: str = "", wrap: bool = True) -> Line:
    """Make a line of pieces; ``style`` applies to pieces that are plain strings."""
    return Line(tuple((p, style) if isinstance(p, str) else p for p in pieces), wrap)


def _lines(rows: Rows) -> tuple[tuple[Line, ...], ...]:
    return tuple(tuple(line(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)


def tabulate(
    heads: Sequence[str], rows: Rows, *, left: Collection[str] = (), width: int | None = None
) -> Table:
    """Make a table; columns are right-aligned, except the first and those named in ``left``."""
    flush = frozenset(index for index, head in enumerate(heads) if index == 0 or head in left)
    return Table(tuple(heads), _lines(rows), flush, width)


def headline(version: str, text: str) -> Section:
    """Make the first line of a report."""
    return Section((line(("ampaudit ", "bold"), (version, "bold"), f"  {text}"),))


def facts(rows: Rows) -> Facts:
    """Make rows of labels and texts."""
    return Facts(_lines(rows))
