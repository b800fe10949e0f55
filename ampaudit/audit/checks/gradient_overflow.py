"""AMP701: an op whose backward produces a gradient beyond the range of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.gradient_evidence import gradient_finding, name_of
from ampaudit.audit.checks.interface import Check, CheckContext, finding_source
from ampaudit.core.text import format_number, format_power, format_scale, short_op
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.backward.record import GradientOrigin, GradientRecord, GradientStats
from ampaudit.run.backward.scale import highest_exponent

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find the op where each overflow begins; those that a lower scale (1 or more) cures are one finding."""
    record = context.record.gradients
    if record is None:
        return
    curable: list[tuple[int, GradientOrigin]] = []
    for origin in record.origins:
        stats = record.broken_at(origin)
        highest = highest_exponent(stats.peak if stats is not None else 0.0, context.number_format)
        if highest >= 0 and _overflows(context, stats):
            curable.append((highest, origin))
        else:
            yield _finding(context, record, origin, highest)
    if curable:
        highest, worst = min(curable, key=lambda item: item[0])
        found = _finding(context, record, worst, highest)
        others = len(curable) - 1
        ops = "op overflows" if others == 1 else "ops overflow"
        more = f"; under this scale {others} other {ops} too" if others else ""
        yield replace(found, cause=f"{found.cause}{more}")


def _overflows(context: CheckContext, stats: GradientStats | None) -> bool:
    """Return whether FP32's gradient exceeds the format; if not, the op itself makes NaN or infinity."""
    return stats is None or stats.values.ref_peak >= context.number_format.overflow_at


def _finding(context: CheckContext, record: GradientRecord, origin: GradientOrigin, highest: int) -> Finding:
    form, site = context.number_format, context.site[origin.site]
    stats = record.broken_at(origin)
    name = name_of(context, origin.value, origin.is_parameter)
    own = origin.value == origin.site
    by = f"{short_op(origin.op)} in {origin.custom}" if origin.op else origin.custom or "its backward"
    what = (
        "the gradient of its own output"
        if own and not origin.custom
        else f"{by} makes a gradient of {name} that"
    )
    reaches = format_number(stats.values.ref_peak) if stats is not None else "an unknown size"
    scaled = f" under the loss scale {format_scale(record.scale)}" if record.scale != 1 else ""
    severity = Severity.ERROR
    if _overflows(context, stats):
        cause = f"{what} reaches {reaches} in FP32{scaled}; {form.name} ends at {format_number(form.max)}"
        advice = f"a loss scale of at most {format_power(highest)} fits"
        suits = context.scale_advice
        use = suits.suggested if suits is not None else None
        if use is not None and 0 <= use < highest:
            advice += f" here, and {format_power(use)} suits the whole model"
        whole = min(highest, suits.high) if suits is not None else highest
        if highest < 0:
            kept = f"layer {site.layer!r}" if site.layer else "this op"
            advice += f": less than no scaling at all; keep {kept} in float32, or use bfloat16"
        elif whole < 0 and suits is not None:
            kept = f"layer {suits.high_at!r}" if suits.high_at else "what sets that limit"
            advice += (
                f" this op, but the whole model needs {format_power(whole)} or less, which is less than no"
            )
            advice += f" scaling at all: keep {kept} in float32, or use bfloat16"
        elif record.dynamic and 2.0**highest >= record.least:
            advice += "; until then the scaler skips steps and lowers the scale"
            severity = Severity.WARNING
    else:
        cause = f"{what} becomes NaN or infinite, although in FP32 it only reaches {reaches}{scaled}"
        advice = "keep this op in float32: no loss scale cures it"
    made = gradient_finding(context, site, "AMP701", stats, cause, advice, name=name, severity=severity)
    if origin.source is not None:
        made = replace(made, source=finding_source(replace(site, source=origin.source, caller=None)))
    return replace(made, origin=True, batch=context.record.names.get(origin.batch))


CHECK = Check("AMP701", find)
