"""AMP701: an op's backward makes a gradient that 16 bits cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.gradient_evidence import gradient_finding, name_of, power, scale_text
from ampaudit.checks.interface import Check, CheckContext, number
from ampaudit.run.gradient_record import GradientOrigin, GradientRecord, GradientSeen

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """One finding for each op at which it begins; those that a lower scale of 1 or more cures are one."""
    record = context.record.gradients
    if record is None:
        return
    curable: list[tuple[int, GradientOrigin]] = []
    for origin in record.origins:
        highest = _highest(context, _seen(record, origin))
        if highest >= 0 and _overflows(context, _seen(record, origin)):
            curable.append((highest, origin))
        else:
            yield _finding(context, record, origin, highest)
    if curable:
        highest, worst = min(curable, key=lambda item: item[0])
        found = _finding(context, record, worst, highest)
        others = [origin.site for _, origin in curable if origin is not worst]
        ops = "op overflows" if len(others) == 1 else "ops overflow"
        more = f"; under this scale {len(others)} other {ops} too" if others else ""
        yield replace(found, cause=f"{found.cause}{more}")


def _seen(record: GradientRecord, origin: GradientOrigin) -> GradientSeen | None:
    table = record.parameters if origin.is_parameter else record.sites
    return table.get(origin.value)  # type: ignore[call-overload]


def _overflows(context: CheckContext, seen: GradientSeen | None) -> bool:
    """Whether FP32's gradient is beyond the format; else the op makes NaN of what would fit."""
    return seen is None or seen.seen.ref_peak >= context.number_format.overflow_at


def _finding(context: CheckContext, record: GradientRecord, origin: GradientOrigin, highest: int) -> Finding:
    form, site = context.number_format, context.site[origin.site]
    seen = _seen(record, origin)
    name = name_of(context, origin.value, origin.is_parameter)
    own = origin.value == origin.site
    what = "the gradient of its own output" if own else f"its backward makes a gradient of {name} that"
    reaches = number(seen.seen.ref_peak) if seen is not None else "an unknown size"
    scaled = f" under the loss scale {scale_text(record.scale)}" if record.scale != 1 else ""
    if not _overflows(context, seen):
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
