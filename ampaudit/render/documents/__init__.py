"""One module per kind of document, with the view that all formats render."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ampaudit.render.view import View

if TYPE_CHECKING:
    from ampaudit.report.documents import Document

__all__ = ["view_class", "view_of"]


def view_class(kind: str) -> type[View[Any]]:
    """Return the view of a kind of document: ``ScanView`` of ``scan.py`` for ``scan``."""
    view: type[View[Any]] = getattr(import_module(f"{__name__}.{kind}"), f"{kind.title()}View")
    return view


def view_of(document: Document) -> View[Any]:
    """Return the view of a document."""
    return view_class(document.kind)(document)
