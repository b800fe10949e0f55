"""AMP701: an op's backward makes a gradient that 16 bits cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.gradient_evidence import gradient_finding, name_of, power
from ampaudit.checks.interface import Check, CheckContext, number
from ampaudit.run.gradient_record import GradientOrigin, GradientRecord, GradientSeen

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """One finding for each op at which it begins."""
    record = context.record.gradients
    if record is None:
        return
    for origin in record.origins:
        table = record.parameters if origin.is_parameter else record.sites
        seen = table.get(origin.value)  # type: ignore[call-overload]
        yield _finding(context, record, origin, seen)


def _finding(
    context: CheckContext, record: GradientRecord, origin: GradientOrigin, seen: GradientSeen | None
) -> Finding:
    form, site = context.number_format, context.site[origin.site]
    highest = _highest(context, seen)
    name = name_of(context, origin.value, origin.is_parameter)
    own = origin.value == origin.site
    what = "the gradient of its own output" if own else f"its backward makes a gradient of {name} that"
    reaches = number(seen.seen.ref_peak) if seen is not None else "an unknown size"
    scaled = f" under the loss scale {number(record.scale)}" if record.scale != 1 else ""
    if seen is not None and seen.seen.ref_peak < form.overflow_at:
        cause = f"{what} becomes NaN or infinite, although in FP32 it only reaches {reaches}{scaled}"
        advice = "keep this op in float32: no loss scale cures it"
        return _made(context, origin, seen, cause, advice, Severity.ERROR)
    cause = f"{what} reaches {reaches} in FP32{scaled}; {form.name} ends at {number(form.max)}"
    advice = f"a loss scale of at most {power(highest)} fits"
    if highest < 0:
        advice += (
            f": less than no scaling at all; better keep layer {site.layer!r} in float32, or use bfloat16"
        )
    if record.dynamic and 2.0**highest >= record.least:
        steps = "until then the scaler skips steps and lowers the scale"
        return _made(context, origin, seen, cause, f"{advice}; {steps}", Severity.WARNING)
    return _made(context, origin, seen, cause, advice, Severity.ERROR)


def _highest(context: CheckContext, seen: GradientSeen | None) -> int:
    """The largest power of two under which this gradient fits."""
    k, limit = 64, context.number_format.overflow_at
    peak = seen.peak if seen is not None else 0.0
    while k > -64 and peak * 2.0**k >= limit:
        k -= 1
    return k


def _made(
    context: CheckContext,
    origin: GradientOrigin,
    seen: GradientSeen | None,
    cause: str,
    advice: str,
    severity: Severity,
) -> Finding:
    site = context.site[origin.site]
    return replace(
        gradient_finding(context, site, "AMP701", seen, cause, advice, severity=severity), origin=True
    )


CHECK = Check("AMP701", find)
