"""The kinds of report that there are, and which one a file holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ampaudit.report.bench import BenchReport
from ampaudit.report.check import CheckResults
from ampaudit.report.comparison import Comparison
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.saved import REPORT_FIELDS, parse_saved, read_saved
from ampaudit.report.training import TrainingReport

if TYPE_CHECKING:
    from ampaudit.report.conversion import Conversion
    from ampaudit.report.verification import Verification

__all__ = ["Document", "parse_document", "read_document"]

Document: TypeAlias = (
    "Report | Comparison | TrainingReport | BenchReport | PlanReport | CheckResults"
    " | Conversion | Verification | LintReport"
)


def _conversion() -> Any:
    from ampaudit.report.conversion import Conversion  # needs torch

    return Conversion


def _verification() -> Any:
    from ampaudit.report.verification import Verification  # needs torch

    return Verification


# each is known by fields that only it has
_KINDS: dict[frozenset[str], Callable[[], Any]] = {
    frozenset({"reports"}): lambda: Comparison,
    frozenset({"variants", "steps"}): lambda: TrainingReport,
    REPORT_FIELDS: lambda: Report,
    frozenset({"rows", "repeats", "device_name"}): lambda: BenchReport,
    frozenset({"targets"}): lambda: CheckResults,
    frozenset({"linted", "unread"}): lambda: LintReport,
    frozenset({"policy", "rules", "cast_bytes"}): lambda: PlanReport,
    frozenset({"bytes_before", "stored"}): _conversion,
    frozenset({"problems", "directory"}): _verification,
}


def read_document(path: Path) -> Document:
    """The report in a file, or in a directory that ``ampaudit convert`` wrote.

    Raises:
        InputError: see ``ampaudit.report.saved.read_saved``.
    """
    if path.is_dir():
        from ampaudit.checkpoint.layout import MANIFEST, REPORT  # needs torch

        path = path / REPORT if (path / MANIFEST).is_file() else path
    found: Document = read_saved(path, _KINDS)
    return found


def parse_document(text: str, name: str) -> Document:
    """The report in a text, which errors call ``name``.

    Raises:
        InputError: see ``ampaudit.report.saved.read_saved``.
    """
    found: Document = parse_saved(text, name, _KINDS)
    return found
