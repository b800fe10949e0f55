"""Renders a document in any of its formats, importing each format on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ampaudit.core.errors import UsageError
from ampaudit.render.documents import view_of
from ampaudit.render.formats import FORMAT_REGISTRY
from ampaudit.report.documents import Document

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["as_file", "for_terminal", "formats_of"]


def for_terminal(document: Document, verbosity: int = 0) -> RenderableType:
    """Return the document as a rich renderable; ``verbosity`` -1 is the verdict alone."""
    from ampaudit.render.terminal import printable

    return printable(view_of(document).sections(verbosity))


def formats_of(document: Document) -> tuple[str, ...]:
    """Return the names of the formats that a document supports."""
    view = view_of(document)
    return tuple(name for name, form in FORMAT_REGISTRY.items() if view.offers(form.needs))


def as_file(document: Document, form: str) -> str:
    """Return the document in a format.

    Args:
        document: of any kind.
        form: a name of ``FORMAT_REGISTRY``.

    Raises:
        UsageError: this kind of document has no such format; the message lists those that it has.
    """
    known = formats_of(document)
    if form not in known:
        raise UsageError(
            f"a document of kind {document.kind!r} has no format {form!r}",
            hint=f"use --format {', '.join(known[:-1])} or {known[-1]}",
        )
    module, _, function = FORMAT_REGISTRY[form].writer.partition(":")
    text: str = getattr(import_module(module), function)(document)
    return text
