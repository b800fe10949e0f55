"""Shows a document in Python: as one line, a card in a notebook, a file, or a data frame."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ampaudit.core.config import path_argument
from ampaudit.core.text import escape_control

CardRows = Iterable[tuple[object, ...]]


class Displayable:
    """A document that can be shown in Python; subclasses define its headline and the rows of its card."""

    __slots__ = ()
    kind: str

    @property
    def headline(self) -> str:
        """The verdict and the subject in one line."""
        raise NotImplementedError

    def card_rows(self) -> CardRows:
        """Return the most important rows."""
        return ()

    def save(self, path: str | Path, form: str | None = None, *, force: bool = False) -> None:
        """Write the document to a file, as ``-o`` does.

        Args:
            path: Path, whose suffix selects the format.
            form: Name of a format that overrides the suffix, such as ``github``.
            force: Whether to replace an existing file.

        Raises:
            UsageError: This kind of document has no such format.
            OutputError: The file exists, or cannot be written; the document is kept elsewhere.
        """
        from ampaudit.render.render import write_document

        write_document(self, path_argument(path, "path"), form, force=force)

    def to_pandas(self) -> Any:
        """Return the rows of the document as a pandas ``DataFrame``: the sites of a scan, as in CSV.

        Raises:
            UsageError: Pandas is not installed, or this kind of document has no rows.
        """
        from ampaudit.render.card import data_frame

        return data_frame(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {escape_control(self.headline)}>"

    def __str__(self) -> str:
        """Return the report as text, as the command prints it."""
        from ampaudit.render.terminal import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from ampaudit.render.card import card

        return card(self)


def counted(count: int, noun: str) -> str:
    """Format a count: ``1 error`` or ``2 errors``."""
    return f"{count} {noun}{'s' if count != 1 else ''}"
