"""Patterns that this input did not break and another one will: warnings, by the same reason as the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampaudit.audit.checks.interface import CheckContext, finding_at
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["LOGARITHMS", "PatternMatch", "latent_findings"]

PatternMatch = Callable[[CheckContext, Site, Origin | None], str | None]
LOGARITHMS = ("log", "log1p", "log2", "log10")


def latent_findings(
    context: CheckContext, code: str, applies: PatternMatch, advice: str
) -> Iterator[Finding]:
    """Sites where the pattern stands in 16 bits and did not go wrong."""
    for site in context.graph_sites:
        reason = applies(context, site, None) if site.id not in context.origin_sites else None
        if reason:
            yield finding_at(
                context, site, code, reason, advice, severity=Severity.WARNING, confidence="rule"
            )
