"""One module per kind of document, each with the view that formats are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampaudit.render.documents.bench import BenchView
from ampaudit.render.documents.check import CheckView
from ampaudit.render.documents.comparison import ComparisonView
from ampaudit.render.documents.conversion import ConversionView
from ampaudit.render.documents.diff import DiffView
from ampaudit.render.documents.lint import LintView
from ampaudit.render.documents.plan import PlanView
from ampaudit.render.documents.scan import ScanView
from ampaudit.render.documents.training import TrainingView
from ampaudit.render.documents.verification import VerificationView
from ampaudit.render.view import View
from ampaudit.report.documents import Document

__all__ = ["VIEWS", "view_of"]

VIEWS: dict[str, Callable[[Any], View[Any]]] = {
    "scan": ScanView,
    "comparison": ComparisonView,
    "plan": PlanView,
    "conversion": ConversionView,
    "verification": VerificationView,
    "check": CheckView,
    "training": TrainingView,
    "bench": BenchView,
    "lint": LintView,
    "diff": DiffView,
}


def view_of(document: Document) -> View[Any]:
    """What formats are made from."""
    return VIEWS[document.kind](document)
