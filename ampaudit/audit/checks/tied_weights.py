"""AMP404: one weight under two names, of which the policy would store only one in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Tied weights for which the policy's rules about names disagree."""
    for names in context.flow.traced.split_ties:
        first = names[0]
        cause = f"{' and '.join(names)} are one tensor, and the policy keeps only some of these in float32"
        advice = "give all names the same rule; the tensor was left in float32 here"
        site, layer = SiteId(f"{first}/stored"), first.rpartition(".")[0]
        yield finding_about("AMP404", site, layer, cause, advice, confidence="rule")


CHECK = Check("AMP404", find)
