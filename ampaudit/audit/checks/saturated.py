"""AMP116: a value beyond the format on a target that saturates."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Under ``--contract saturate``: find values beyond the format in FP32, except masks and constants."""
    if not context.saturating:
        return
    form = context.number_format
    for site in context.low_precision_sites:
        seen = context.observed(site.id)
        meant = site.id in context.flow.constants or site.id in context.record.by_design
        makers = context.flow.makers(site)
        inherited = any(context.observed(maker.id).ref_peak >= form.overflow_at for maker in makers)
        if seen.ref_peak >= form.overflow_at and not meant and not inherited:
            cause = (
                f"in FP32 the values reach {format_number(seen.ref_peak)}; "
                f"they become {format_number(form.max)} here"
            )
            yield finding_at(context, site, "AMP116", cause, "treat it as an overflow: no later op shows it")


CHECK = Check("AMP116", find)
