"""Renders sections with rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ampaudit.render.blocks import Block, Facts, Indented, Labelled, Line, Section, Table
from ampaudit.render.documents import view_of
from ampaudit.render.grid import hanging, labelled, open_table
from ampaudit.render.plaintext import as_text
from ampaudit.report.documents import Document

__all__ = ["printable", "to_text"]

_MAX_WIDTH = 100_000


def printable(sections: Iterable[Section]) -> Group:
    """Return the sections separated by empty lines."""
    parts: list[RenderableType] = []
    for section in sections:
        parts += [Text()] if parts else []
        parts += [_text(section.heading)] if section.title else []
        parts += map(_rendered, section.blocks)
    return Group(*parts)


def to_text(document: Document, width: int = 100) -> str:
    """Return the document as plain text."""
    shown = printable(view_of(document).sections())
    return as_text(lambda console: console.print(shown, crop=False), width)


class _WholeTable:
    """A table that is not shortened where nothing limits its width: in a file, or in a pipe."""

    def __init__(self, table: RichTable) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            whole = options.update(max_width=_MAX_WIDTH)
            options = options.update(max_width=Measurement.get(console, whole, self._table).maximum)
        yield from console.render(self._table, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table)


def _rendered(block: Block) -> RenderableType:
    match block:
        case Line():
            return _text(block)
        case Table():
            return _table(block)
        case Facts():
            return labelled(tuple(map(_text, row)) for row in block.rows)
        case Labelled():
            return hanging((_text(label), _group(blocks)) for label, blocks in block.rows)
        case Indented():
            return Padding(_group(block.blocks), (0, 0, 0, block.by), expand=False)


def _group(blocks: Iterable[Block]) -> RenderableType:
    found = [_rendered(block) for block in blocks]
    return found[0] if len(found) == 1 else Group(*found)


def _text(line: Line, *, fold: bool = False) -> Text:
    made = Text(no_wrap=True, overflow="ignore") if not line.wrap else Text(overflow="fold" if fold else None)
    for text, style in line.pieces:
        made.append(text, style or None)
    return made


def _table(table: Table) -> RenderableType:
    left = [table.heads[index] for index in table.left]
    made = open_table(*table.heads, width=table.width, left=left)
    for row in table.rows:
        made.add_row(*(_text(cell, fold=table.fold) for cell in row))
    return _WholeTable(made)
