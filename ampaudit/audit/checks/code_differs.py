"""AMP212: the model's code takes another path in 16 bits, and an output differs from the FP32 model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_at, source_of
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.code_record import OutputDifference
from ampaudit.trace.compare import CodeDifference

__all__ = ["CHECK", "code_finding", "describe_difference"]

_ADVICE = "write the line so that it does the same in every precision"


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding: the line where the code differs, and the output that suffers most."""
    code = context.record.code
    graded = [(severity, d) for d in code.outputs.values() if (severity := _severity(context, d)) is not None]
    if not graded:
        return
    severity, worst = min(graded, key=lambda item: (-item[0].rank, item[1].code_sqnr_db))
    more = f"; {len(graded) - 1} more of the outputs differ" if len(graded) > 1 else ""
    effect = _effect(worst) + more
    if code.place is not None:
        what = describe_difference(code.place, context.number_format.name)
    else:
        others = f" (first of {len(code.reads)} such lines)" if len(code.reads) > 1 else ""
        what = f"{_name(code.reads[0])} reads a precision{others}, and the FP32 model returns other values"
    found = code_finding(context, code.place, "AMP212", f"{what}: {effect}", _ADVICE, severity, worst.name)
    if code.place is None and code.reads:
        found = replace(found, source=source_of(code.reads[0]))
    yield found


def _severity(context: CheckContext, seen: OutputDifference) -> Severity | None:
    """Return an error if the code spoils an output, a warning if it adds more error than rounding."""
    code, limit = context.record.code, context.min_sqnr
    mostly = 2 * seen.code_err_sq >= seen.err_sq
    if seen.problem is not None or (seen.sqnr_db < limit and (mostly or seen.code_sqnr_db < limit)):
        return Severity.ERROR
    if seen.agrees or code.place is None:
        return None  # FP32's own noise
    return Severity.WARNING if mostly else Severity.NOTE


def _effect(seen: OutputDifference) -> str:
    if seen.problem is not None:
        return f"{seen.name} {seen.problem}"
    if seen.integers:
        return f"{seen.name} differs from FP32 in {seen.err_sq:,.0f} of {seen.ref_sq:,.0f} integers"
    if not math.isfinite(seen.code_sqnr_db):
        return f"{seen.name} has nothing in common with FP32"
    total = f"has {seen.sqnr_db:.0f} dB against FP32"
    if not math.isfinite(seen.sqnr_db):
        total = "is exact" if seen.sqnr_db > 0 else "is inf or NaN"
    return f"{seen.name} {total}, {seen.code_sqnr_db:.0f} dB from this difference alone"


def describe_difference(place: CodeDifference, dtype: str) -> str:
    """Describe what a line does in 16 bits and in FP32."""
    where = _name(place.source) if place.source is not None else f"layer {place.layer or '(top)'}"
    if place.fp32 is None:
        does = f"runs {place.low} in {dtype} and nothing in FP32"
    elif place.low is None:
        does = f"runs {place.fp32} in FP32 and nothing in {dtype}"
    else:
        does = f"runs {place.low} in {dtype} and {place.fp32} in FP32"
    others = f" (first of {place.lines} such lines)" if place.lines > 1 else ""
    return f"{where} {does}{others}"


def code_finding(
    context: CheckContext,
    place: CodeDifference | None,
    code: str,
    cause: str,
    advice: str,
    severity: Severity,
    output: str,
) -> Finding:
    """Return a finding at the op where the code differs, or else at the output."""
    made = next((site for name, site, _ in context.outputs if name == output), None)
    if place is None and made is not None:
        return finding_at(context, context.site[made], code, cause, advice, severity=severity)
    if place is None:
        return finding_about(code, SiteId("(top)/output"), "", cause, advice, severity=severity)
    if place.low is not None and place.site in context.site:
        return finding_at(context, context.site[place.site], code, cause, advice, severity=severity)
    source = source_of(place.source, place.caller)
    about = finding_about(code, place.site, place.layer, cause, advice, severity=severity)
    return replace(about, phase="forward", source=source)


def _name(line: SourceLine) -> str:
    return f"{Path(line.file).name}:{line.line}"


CHECK = Check("AMP212", find)
