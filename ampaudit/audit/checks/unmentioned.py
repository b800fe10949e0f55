"""AMP902: an op from outside ATen that no rule mentions."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.audit.checks.uncovered import foreign_sites
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note per op; ATen ops without a rule are counted in the report's coverage."""
    reported: set[str] = set()
    for site in () if context.ranges_only else foreign_sites(context):
        if not site.decision.explicit and site.op not in reported:
            reported.add(site.op)
            cause = f"{site.op} is not an ATen op, and no rule mentions it: it gets the dtype of its inputs"
            advice = "add a rule that names it, with what its kernel can hold"
            yield finding_at(context, site, "AMP902", cause, advice, confidence="rule")


CHECK = Check("AMP902", find)
