"""The kinds of report that there are, and which one a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampaudit.gate.result import CheckResults
from ampaudit.report.comparison import Comparison
from ampaudit.report.model import Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.saved import REPORT_FIELDS, parse_saved, read_saved
from ampaudit.report.training import TrainingReport

__all__ = ["Document", "parse_document", "read_document"]

Document = Report | Comparison | TrainingReport | PlanReport | CheckResults
# each is known by fields that only it has
_KINDS: dict[Any, frozenset[str]] = {
    Comparison: frozenset({"reports"}),
    TrainingReport: frozenset({"variants", "steps"}),
    Report: REPORT_FIELDS,
    CheckResults: frozenset({"targets"}),
    PlanReport: frozenset({"policy", "rules", "cast_bytes"}),
}


def read_document(path: Path) -> Document:
    """The report in a file.

    Raises:
        InputError: see ``ampaudit.report.saved.read_saved``.
    """
    found: Document = read_saved(path, _KINDS)
    return found


def parse_document(text: str, name: str) -> Document:
    """The report in a text, which errors call ``name``.

    Raises:
        InputError: see ``ampaudit.report.saved.read_saved``.
    """
    found: Document = parse_saved(text, name, _KINDS)
    return found
