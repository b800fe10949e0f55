"""AMP404: a tied weight that the policy stores in 16 bits under only one of its names."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find tied weights whose names fall under different rules."""
    for names in context.flow.traced.split_ties:
        first = names[0]
        cause = f"{' and '.join(names)} are one tensor, and the policy keeps only some of these in float32"
        advice = "give all names the same rule; the tensor was left in float32 here"
        site, layer = SiteId(f"{first}/stored"), first.rpartition(".")[0]
        yield finding_about("AMP404", site, layer, cause, advice, confidence="rule")


CHECK = Check("AMP404", find)
