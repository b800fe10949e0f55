"""AMP110: an FP32 value beyond the 16-bit format (``--ranges``), which would overflow if computed in it."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose FP32 peak would round to infinity, except masks and constants."""
    if not context.ranges_only:
        return
    form = context.number_format
    for site in context.sites:
        seen = context.observed(site.id)
        meant = site.id in context.parameter_free or site.id in context.record.by_design
        if not seen.elements or seen.ref_peak < form.overflow_at or meant:
            continue
        cause = (
            f"FP32 values reach {format_number(seen.ref_peak)}; {form.name} ends at {format_number(form.max)}"
        )
        advice = "run a full scan: it says whether the policy computes this in 16 bits, and what that breaks"
        yield finding_at(context, site, "AMP110", cause, advice)


CHECK = Check("AMP110", find)
