"""AMP704: a parameter gradient that is inaccurate without overflowing or vanishing."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.gradient_evidence import gradient_finding, name_of, vanishes
from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.report.finding import Finding
from ampaudit.run.backward.record import GradientStats
from ampaudit.trace import Role, Site

__all__ = ["CHECK"]

_LISTED = 5


def find(context: CheckContext) -> Iterator[Finding]:
    """Find the least accurate parameter gradients, unless a graver finding explains them."""
    record = context.record.gradients
    if record is None or record.origins or context.record.origins:
        return
    if any(vanishes(gradient.stats) for gradient in context.gradients):
        return
    found: list[tuple[float, Site, GradientStats]] = []
    for site in context.graph_sites:
        stats = record.sites.get(site.id) if site.role is Role.WEIGHT_CAST else None
        if stats is None or stats.cancelled or not stats.values.ref_peak:
            continue
        sqnr = stats.values.sqnr_db
        if sqnr is not None and sqnr < context.min_sqnr:
            found.append((sqnr, site, stats))
    for sqnr, site, stats in sorted(found, key=lambda item: item[0])[:_LISTED]:
        name = name_of(context, site.id, False)
        cause = (
            f"the gradient of {name} has {sqnr:.0f} dB against FP32; {context.min_sqnr:.0f} dB are required"
        )
        advice = "look for a sum in the backward pass that cancels, or keep the layers after it in float32"
        yield gradient_finding(context, site, "AMP704", stats, cause, advice, name=name)


CHECK = Check("AMP704", find)
