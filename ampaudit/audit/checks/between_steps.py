"""AMP118: the function that makes a step's inputs from the last one's outputs leaves the range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Evidence, Finding, Source
from ampaudit.run.record import StateFault

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per input, for the first step in which it breaks: FP32's own stays out of range."""
    seen: set[str] = set()
    for row in context.record.steps:
        for fault in row.faults:
            if fault.name not in seen:
                seen.add(fault.name)
                yield _finding(context, fault, row.step)


def _finding(context: CheckContext, fault: StateFault, step: int) -> Finding:
    form, name = context.number_format, fault.name
    what = f"next_inputs makes {name} from the outputs of step {step}, which are finite"
    ends = f"{form.name} ends at {format_number(form.max)}"
    why = f"in FP32 it reaches {format_number(fault.peak)}; {ends}"
    if fault.peak <= form.max:
        peak = format_number(fault.peak)
        why = f"in FP32 it is in range (up to {peak}), and a value on the way to it is not; {ends}"
    advice = "compute the next inputs in float32 and cast them back where they are in range again"
    found = finding_about("AMP118", SiteId(f"next_inputs/{name}"), "next_inputs", f"{what}; {why}", advice)
    line = fault.line
    return replace(
        found,
        phase="forward",
        op=fault.op,
        origin=True,
        source=None if line is None else Source(line.file, line.line, line.code),
        evidence=Evidence(
            peak=fault.peak,
            limit=form.max,
            inf=fault.broken - fault.nan,
            nan=fault.nan,
            elements=fault.elements,
            headroom_bits=form.headroom_bits(fault.peak) if fault.peak > 0.0 else None,
            step=step,
        ),
    )


CHECK = Check("AMP118", find)
