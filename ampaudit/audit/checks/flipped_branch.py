"""AMP214: the model's code decides differently on the values of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_at, source_of
from ampaudit.core.text import plural
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.path_record import ReadStats

__all__ = ["CHECK", "finding_at_read"]

_ADVICE = "compute what is decided on in float32, or decide with a margin that rounding does not cross"


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield a warning per line, and an error if an overflow is the reason."""
    dtype = context.number_format.name
    for stats in context.record.path.reads.values():
        if not stats.differing:
            continue
        times = "" if stats.reads == 1 else f" {stats.differing} of {plural(stats.reads, 'time')}"
        verb = f"{stats.name} returns" if stats.sizes else "it reads"
        values = f"{verb} {stats.fp32} in FP32 and {stats.low} in {dtype}"
        why = "because of a value that overflows before; " if stats.faults else ""
        cause = f"this line decides differently in {dtype}{times}: {values}; {why}the audit follows FP32"
        severity = Severity.ERROR if stats.faults else None
        yield finding_at_read(context, stats, "AMP214", cause, _ADVICE, severity)


def finding_at_read(
    context: CheckContext,
    stats: ReadStats,
    code: str,
    cause: str,
    advice: str,
    severity: Severity | None = None,
) -> Finding:
    """Return a finding at a line that reads values, with the measurements of the op that made them."""
    made = context.site.get(stats.place)
    if made is None:
        found = finding_about(code, stats.place, stats.layer, cause, advice, severity=severity)
    else:
        found = finding_at(context, made, code, cause, advice, severity=severity)
    source = source_of(stats.source, stats.caller)
    return replace(found, phase="forward", layer=stats.layer, source=source or found.source)


CHECK = Check("AMP214", find)
