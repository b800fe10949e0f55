"""One module per kind of document, with the view that all formats render."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ampaudit.render.view import View
from ampaudit.report.documents import Document

__all__ = ["view_of"]


def view_of(document: Document) -> View[Any]:
    """Return the view of a document: ``ScanView`` of ``scan.py`` for a scan."""
    module = import_module(f"{__name__}.{document.kind}")
    view: View[Any] = getattr(module, f"{document.kind.title()}View")(document)
    return view
