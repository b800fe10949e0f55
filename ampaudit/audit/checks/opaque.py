"""AMP904: an op whose kernel computes what nobody looks at."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.audit.checks.uncovered import findings_on_gaps
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op, at its first site."""
    return findings_on_gaps(context, "AMP904", "judge its kernel by hand; the sites after it are audited")


CHECK = Check("AMP904", find)
