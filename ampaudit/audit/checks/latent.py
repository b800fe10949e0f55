"""Warns of patterns that are safe on this input and would break on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["LOGARITHMS", "latent_check"]

PatternMatch = Callable[[CheckContext, Site, Origin | None], str | None]
LOGARITHMS = ("log", "log1p", "log2", "log10")


def latent_check(code: str, applies: PatternMatch, advice: str) -> Check:
    """Return the check for sites that match a pattern in 16 bits but did not break."""
    return Check(code, partial(_find, code, applies, advice))


def _find(code: str, applies: PatternMatch, advice: str, context: CheckContext) -> Iterator[Finding]:
    for site in context.graph_sites:
        reason = applies(context, site, None) if site.id not in context.origin_sites else None
        if reason:
            yield finding_at(
                context, site, code, reason, advice, severity=Severity.WARNING, confidence="rule"
            )
