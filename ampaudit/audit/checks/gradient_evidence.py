"""Makes findings about gradients, with their numbers."""

from __future__ import annotations

from dataclasses import replace

from ampaudit.audit.checks.interface import CheckContext, evidence_of, finding_about, finding_source
from ampaudit.report.finding import Evidence, Finding, Severity
from ampaudit.run.backward.record import GradientStats
from ampaudit.trace import Role, Site

__all__ = ["VANISHED", "gradient_finding", "name_of", "vanishes"]

VANISHED = 0.5  # share of a gradient's elements that is flushed
CARRIED_DB = 20.0  # above, what was flushed carries less than a tenth of the gradient


def vanishes(stats: GradientStats) -> bool:
    """Return whether most of a 16-bit gradient is flushed to zero and the rest is inaccurate."""
    if not stats.low_precision or stats.cancelled or stats.flushed_share < VANISHED:
        return False
    sqnr = stats.values.sqnr_db
    return sqnr is not None and sqnr < CARRIED_DB


def name_of(context: CheckContext, value: str, is_parameter: bool) -> str:
    """Return the display name of a gradient: its parameter, even behind a cast, or its site."""
    site = None if is_parameter else next((s for s in context.sites if s.id == value), None)
    if site is not None and site.role is Role.WEIGHT_CAST and site.weight is not None:
        return site.weight
    return value


def gradient_finding(
    context: CheckContext,
    site: Site,
    code: str,
    stats: GradientStats | None,
    cause: str,
    advice: str,
    *,
    name: str = "",
    severity: Severity | None = None,
) -> Finding:
    """Return a finding about the backward of the op at a site; ``name`` is whose gradient was measured."""
    made = finding_about(code, site.id, site.layer, cause, advice, severity=severity)
    evidence = Evidence()
    if stats is not None:
        measured = evidence_of(stats.values, context.number_format)
        # of gradients no elements are sampled
        evidence = replace(measured, flushed=stats.flushed_share, subnormal=None, about=f"gradient of {name}")
    return replace(made, phase="backward", op=site.op, source=finding_source(site), evidence=evidence)
