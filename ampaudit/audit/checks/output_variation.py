"""AMP211: an output whose variation is below one step of the format at its mean."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.audit.checks.output_error import inaccurate
from ampaudit.core.text import format_number
from ampaudit.report.accuracy import LOST_DB
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find outputs that are accurate only because of their mean."""
    if context.ranges_only or context.harmed:
        return
    wrong = inaccurate(context)
    for name, made, _ in context.outputs:
        seen = context.record.outputs.get(name)
        varies = seen.variation_db if seen is not None else None
        if seen is None or made is None or name in wrong or varies is None or varies >= LOST_DB:
            continue
        spread = (seen.spread_sq / seen.elements) ** 0.5
        mean = ((seen.ref_sq - seen.spread_sq) / seen.elements) ** 0.5
        cause = (
            f"{name} varies by {format_number(spread)} around {format_number(mean)}, and its error is "
            f"{format_number((seen.err_sq / seen.elements) ** 0.5)}: "
            f"{seen.accuracy_db:.0f} dB with the mean, "
            f"{varies:.0f} dB without it"
        )
        advice = "give this output in float32, or add the constant part after the model"
        yield finding_at(context, context.site[made], "AMP211", cause, advice)


CHECK = Check("AMP211", find)
