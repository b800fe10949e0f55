"""AMP215: values leave torch, and what other code makes of them is not audited."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.flipped_branch import finding_at_read
from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.core.decibels import signal_to_noise_db
from ampaudit.report.finding import Finding
from ampaudit.trace.path.reads import ReadKind

__all__ = ["CHECK"]

_ADVICE = "compute with tensors, or judge by hand what this code makes of 16-bit values"


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield a note per line that takes an array of floats."""
    dtype = context.number_format.name
    for stats in context.record.path.reads.values():
        if stats.kind is not ReadKind.ARRAY:
            continue
        sqnr = signal_to_noise_db(stats.signal_sq, stats.error_sq)
        accuracy = "" if sqnr is None else f"; they have {sqnr:.0f} dB in {dtype}"
        cause = f"{stats.name}() hands values to code outside torch, which runs on FP32's{accuracy}"
        yield finding_at_read(context, stats, "AMP215", cause, _ADVICE)


CHECK = Check("AMP215", find)
