"""Lays out tables with rich."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_MAX_WIDTH = 100_000


class _WholeGrid(Table):
    """A grid that widens to its longest word in a file or a pipe, where nothing limits the width."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            needed = self._needed(self.__rich_measure__(console, options.update(max_width=_MAX_WIDTH)))
            options = options.update(max_width=max(needed, options.max_width))
        yield from super().__rich_console__(console, options)

    def _needed(self, measured: Measurement) -> int:
        return measured.minimum


class _WholeTable(_WholeGrid):
    """A grid that widens until no row wraps."""

    def _needed(self, measured: Measurement) -> int:
        return measured.maximum


def open_table(*columns: str, width: int | None = None, left: Collection[str] = ()) -> Table:
    """Make a borderless table; columns are right-aligned, except the first and those in ``left``."""
    table = _WholeTable(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for index, name in enumerate(columns):
        flush: Literal["left", "right"] = "left" if index == 0 or name in left else "right"
        table.add_column(name, justify=flush, min_width=width if index == 0 else None)
    return table


class UncutTable:
    """A table of short cells; columns that do not fit the terminal continue below the others."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[Text]], left: Collection[str]) -> None:
        self._heads, self._rows, self._left = heads, rows, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [
            max([cell_len(head), *(row[column].cell_len for row in self._rows)]) + 2
            for column, head in enumerate(self._heads)
        ]
        room = options.max_width if console.is_terminal else _MAX_WIDTH
        first, *others = range(len(widths))
        while others:
            columns = [first, others.pop(0)]
            while others and sum(widths[column] for column in (*columns, others[0])) <= room:
                columns.append(others.pop(0))
            table = open_table(*(self._heads[column] for column in columns), left=self._left)
            for row in self._rows:
                table.add_row(*(row[column] for column in columns))
            yield table
            if others:
                yield Text()


def hanging(rows: Iterable[tuple[Text, RenderableType]]) -> Table:
    """Make a grid of labels and the content beside them."""
    grid = _WholeGrid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


def labelled(rows: Iterable[tuple[str | Text, ...]]) -> Table:
    """Make a grid of bold labels, each with one or more columns of text."""
    grid = _WholeGrid.grid(padding=(0, 2))
    for label, *texts in rows:
        grid.add_row(Text(str(label), style="bold"), *(Text(t) if isinstance(t, str) else t for t in texts))
    return grid
