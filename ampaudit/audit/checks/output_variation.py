"""AMP211: an output whose rows vary less than one step of the format at their mean."""

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
        rows = seen.rows if seen is not None else None
        if seen is None or made is None or name in wrong or rows is None or rows.db >= LOST_DB:
            continue
        spread, error = ((part / rows.elements) ** 0.5 for part in (rows.spread_sq, rows.err_sq))
        what = "it varies" if not rows.worst else "rows vary"
        around = f" around {format_number(rows.mean)}" if not rows.worst else ""
        cause = (
            f"{name} has {seen.accuracy_db:.0f} dB only because of its mean: {what} by "
            f"{format_number(spread)}{around}, and the error is {format_number(error)} ({rows.db:.0f} dB)"
        )
        if rows.worst:
            where = ", ".join(":" if i is None else str(i) for i in rows.index)
            cause += f"; the worst is [{where}], around {format_number(rows.mean)}: {rows.worst_db:.0f} dB"
        advice = "subtract the level from the inputs and add it to the output in float32; a float32 output"
        advice += " alone helps if the inputs keep their variation in 16 bits"
        yield finding_at(context, context.site[made], "AMP211", cause, advice)


CHECK = Check("AMP211", find)
