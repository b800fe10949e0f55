"""AMP213: the code reads a precision, but the FP32 model could not be run for comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.code_differs import code_finding, describe_difference
from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]

_ADVICE = "compare the outputs of the 16-bit model and of the FP32 model yourself"


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield a warning if the traces differ, otherwise a note."""
    code = context.record.code
    if code.failure is None or code.outputs:
        return
    place = code.place
    severity = Severity.NOTE if place is None and not code.untraced else Severity.WARNING
    alike = "nor traced" if code.untraced else "its trace is alike"
    if place is not None:
        alike = describe_difference(place, context.number_format.name)
    cause = f"the FP32 model could not be run eagerly ({code.failure}); {alike}"
    first = context.flow.traced.outputs[0] if context.flow.traced.outputs else ""
    yield code_finding(context, place, "AMP213", cause, _ADVICE, severity, first)


CHECK = Check("AMP213", find)
