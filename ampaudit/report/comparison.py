"""Several policies on one model, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.report.model import Report

__all__ = ["Comparison"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Reports of one model under several policies."""

    reports: tuple[Report, ...]

    @property
    def exit_code(self) -> int:
        """The gravest of all: 3, a check that crashed, before 1, findings."""
        return max(report.exit_code for report in self.reports)
