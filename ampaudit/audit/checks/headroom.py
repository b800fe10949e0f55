"""AMP102: a value in range, but with less headroom than required."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find healthy 16-bit sites with too little headroom; masks are large by design."""
    if context.ranges_only:
        return
    form = context.number_format
    for site in context.sites:
        seen = context.observed(site.id)
        exempt = site.id in context.broken_sites or site.id in context.record.by_design
        if (
            exempt
            or site.id in context.parameter_free
            or not seen.elements
            or not context.low_precision(site)
        ):
            continue
        bits = form.headroom_bits(seen.finite_peak)
        if bits < context.min_headroom and seen.bad == 0:
            cause = (
                f"a peak of {format_number(seen.finite_peak)} leaves "
                f"{bits:.2f} bits of headroom below {format_number(form.max)}"
            )
            advice = (
                f"values {2 ** max(bits, 0):.3g} times as large overflow here; check more data with --batches"
            )
            yield finding_at(context, site, "AMP102", cause, advice)


CHECK = Check("AMP102", find)
