"""AMP208: an op that loses most of its precision by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.accuracy import local_error_matters
from ampaudit.audit.checks.cancellation import subtracts
from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Site

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find ops whose own error is above the threshold, except the differences of AMP205."""
    for site in context.low_precision_sites:
        if site.id in context.origin_sites or subtracts(context, site) or _overflows_before(context, site):
            continue
        severity = local_error_matters(context, site)
        if severity is not None:
            db = context.observed(site.id).local_sqnr_db
            cause = f"on exact inputs this op alone gives {db:.0f} dB; {context.min_sqnr:.0f} dB are required"
            advice = "keep this op in float32: the error is its own, not inherited"
            yield finding_at(context, site, "AMP208", cause, advice, severity=severity)


def _overflows_before(context: CheckContext, site: Site) -> bool:
    """Return whether an input is too large for the format: its overflow is another finding."""
    limit = context.number_format.max
    return any(context.observed(maker.id).ref_peak > limit for maker in context.flow.makers(site))


CHECK = Check("AMP208", find)
