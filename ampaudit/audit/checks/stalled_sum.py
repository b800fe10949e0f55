"""AMP210: sums and buffers that stop changing because each addition rounds away."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.audit.checks.output_error import findings_with
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]

MAX_UNCHANGED = 0.5  # share of a buffer's elements to be changed that stay as they were


def find(context: CheckContext) -> Iterator[Finding]:
    """Find sums that spoil an output, and buffers that stay constant although FP32 changes them.

    A counter that stands still is an error. Other values may have converged: that is a note.
    """
    yield from findings_with("AMP210", context)
    for update in context.record.buffers.values():
        if update.stalled < MAX_UNCHANGED * update.moved:
            continue
        form = context.number_format.name
        cause = (
            f"the buffer {update.name} stalls: FP32 changes {update.moved} of its elements, and {form} "
            f"leaves {update.stalled} of them as they were, such as {format_number(update.example)}"
        )
        advice = "keep the buffer in float32, or count in integers"
        severity = Severity.ERROR if update.counts else Severity.NOTE
        yield finding_at(context, context.site[update.site], "AMP210", cause, advice, severity=severity)


CHECK = Check("AMP210", find)
