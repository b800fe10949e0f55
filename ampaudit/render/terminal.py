"""Renders sections with rich."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ampaudit.render.blocks import Block, Facts, Indented, Labelled, Line, Section, Table
from ampaudit.render.grid import UncutTable, hanging, labelled, open_table
from ampaudit.render.view import Renderable, view_of

if TYPE_CHECKING:
    from rich.console import Console


def printable(sections: Iterable[Section]) -> Group:
    """Return the sections separated by empty lines."""
    parts: list[RenderableType] = []
    for section in sections:
        parts += [Text()] if parts else []
        parts += [_text(section.heading)] if section.title else []
        parts += map(_render, section.blocks)
    return Group(*parts)


def to_text(document: Renderable, width: int = 100) -> str:
    """Return the document as plain text."""
    content = printable(view_of(document).sections())
    return as_text(lambda console: console.print(content, crop=False), width)


def _render(block: Block) -> RenderableType:
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
    parts = [_render(block) for block in blocks]
    return parts[0] if len(parts) == 1 else Group(*parts)


def _text(line: Line, *, fold: bool = False) -> Text:
    text = Text(no_wrap=True, overflow="ignore") if not line.wrap else Text(overflow="fold" if fold else None)
    for piece, style in line.pieces:
        text.append(piece, style or None)
    return text


def _table(table: Table) -> RenderableType:
    flush = [table.heads[index] for index in table.left]
    if not table.fold:
        return UncutTable(table.heads, [[_text(cell) for cell in row] for row in table.rows], flush)
    grid = open_table(*table.heads, width=table.width, left=flush)
    for row in table.rows:
        grid.add_row(*(_text(cell, fold=table.fold) for cell in row))
    return grid


def as_text(printed: Callable[[Console], None], width: int, *, terminal: bool = False) -> str:
    """Return printed output as text without colors and trailing blanks.

    Args:
        printed: Function that prints to a console.
        width: Width in characters at which lines wrap.
        terminal: Whether tables must fit the width; otherwise they are as wide as their content.
    """
    from rich.console import Console

    stream = io.StringIO()
    printed(Console(file=stream, width=width, highlight=False, color_system=None, force_terminal=terminal))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().split("\n")[:-1])
