"""The registry of document kinds: each has a line here and a module in ``render/documents``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias, get_args

from ampaudit.report.bench import BenchReport
from ampaudit.report.check import CheckResults
from ampaudit.report.conversion import Conversion
from ampaudit.report.difference import Differences
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Comparison, Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.training import TrainingReport
from ampaudit.report.tuning import TuningReport
from ampaudit.report.verification import Verification

__all__ = ["DOCUMENTS", "Document", "kind_of"]

Document: TypeAlias = (
    Report
    | Comparison
    | PlanReport
    | Conversion
    | Verification
    | CheckResults
    | TrainingReport
    | TuningReport
    | BenchReport
    | LintReport
    | Differences
)
DOCUMENTS: dict[str, type[Document]] = {
    str(field.default): document
    for document in get_args(Document)
    for field in fields(document)
    if field.name == "kind"
}


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return the kind of document in parsed JSON; ``None`` if it is not ours."""
    return next((kind for kind in DOCUMENTS if kind == data.get("kind")), None)
