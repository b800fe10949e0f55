"""AMP112: a square inside a norm or variance that overflows without showing in the output."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find norms with 16-bit input whose squares exceed the limit; a note if the kernel is fused."""
    form = context.number_format
    for site in context.graph_sites:
        inside = context.observed(site.id).inside_peak
        if inside < form.overflow_at or site.id in context.broken_sites:
            continue
        if context.fused:
            what = (
                "a kernel with float32 inside is assumed here; taken apart, as in many exports, it overflows"
            )
        else:
            what = "taken apart into 16-bit ops it overflows, and the norm returns zeros"
        yield finding_at(
            context,
            site,
            "AMP112",
            f"a square inside reaches {format_number(inside)}; "
            f"{form.name} ends at {format_number(form.max)}; {what}",
            "keep this norm and its input in float32, or divide the input by its peak first",
            severity=Severity.NOTE if context.fused else Severity.ERROR,
        )


CHECK = Check("AMP112", find)
