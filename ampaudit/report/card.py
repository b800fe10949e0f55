"""Shows a document in Python: in one line, and as a short card in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ampaudit.core.text import escape_control

__all__ = ["CardRows", "Shown", "counted"]

CardRows = Iterable[tuple[object, ...]]
_ROWS = 8  # of a card; the page of a report has all


class Shown:
    """A document with a headline and the rows of its card."""

    __slots__ = ()

    @property
    def headline(self) -> str:
        """The verdict and the subject in one line."""
        raise NotImplementedError

    def card_rows(self) -> CardRows:
        """Return the most important rows."""
        return ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {escape_control(self.headline)}>"

    def _repr_html_(self) -> str:
        rows = list(self.card_rows())
        cells = ("".join(f"<td>{_safe(value)}</td>" for value in row) for row in rows[:_ROWS])
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        more = f"<p>and {len(rows) - _ROWS} more</p>" if len(rows) > _ROWS else ""
        return f"<div><p><b>{_safe(self.headline)}</b></p><table>{table}</table>{more}</div>"


def counted(count: int, noun: str) -> str:
    """Format a count: ``1 error`` or ``2 errors``."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _safe(value: object) -> str:
    return escape(escape_control(str(value)))
