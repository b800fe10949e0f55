"""The document of a scan under several policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ampaudit.report.card import CardRows, Shown, counted
from ampaudit.report.finding import Severity
from ampaudit.report.model import Report

__all__ = ["Comparison"]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Reports of one model under several policies."""

    schema: Literal[1] = field(default=1, kw_only=True)
    reports: tuple[Report, ...]
    kind: Literal["comparison"] = "comparison"

    @property
    def exit_code(self) -> int:
        """The gravest of all: 3 (a check crashed), 1 (findings) or 0."""
        return max(report.exit_code for report in self.reports)

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        return f"{len(self.reports)} policies: {', '.join(report.run.policy for report in self.reports)}"

    def card_rows(self) -> CardRows:
        """Return the verdict of each policy, its errors and the accuracy of the outputs."""
        counts = [counted(report.count(Severity.ERROR), "error") for report in self.reports]
        return [
            (report.verdict.upper(), report.run.policy, found, f"output {report.accuracy}")
            for report, found in zip(self.reports, counts, strict=True)
        ]
