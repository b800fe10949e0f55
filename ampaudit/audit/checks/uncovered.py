"""AMP901: values that were not checked."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op that could not be observed, at its first site."""
    for op, reason in sorted(context.record.uncovered.items()):
        site = next(s for s in context.sites if s.op == op)
        advice = "judge this op by hand; the sites after it are audited"
        yield finding_at(context, site, "AMP901", f"{op} is not covered: {reason}", advice)


CHECK = Check("AMP901", find)
