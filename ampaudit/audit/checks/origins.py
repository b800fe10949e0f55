"""Reports origins, each with the most specific cause that applies.

A cause is a file with ``CAUSE = Cause(code, applies, advice)``; the first in order that applies is named.
AMP101 and AMP103 are what is left: a value that left the range, or a result outside its op's domain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks import (
    attention,
    buffers,
    cancellation,
    constant,
    domain,
    epsilon,
    exponential,
    flushed,
    log_sigmoid,
    log_softmax,
    masked_row,
    positions,
    reduction,
    residual,
    squares,
    undefined,
)
from ampaudit.audit.checks.compared_numbers import rounded_number
from ampaudit.audit.checks.hard_cast import names_dtype
from ampaudit.audit.checks.interface import Cause, Check, CheckContext, finding_at
from ampaudit.core.formats import BFLOAT16
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.record import Origin
from ampaudit.trace import Role, Site

__all__ = ["CHECK", "DOMAIN_CAUSES", "OVERFLOW_CAUSES"]

OVERFLOW_CAUSES: tuple[Cause, ...] = (
    buffers.CAUSE,
    masked_row.CAUSE,
    positions.CAUSE,
    constant.CAUSE,
    attention.CAUSE,
    squares.CAUSE,
    epsilon.CAUSE,
    exponential.CAUSE,
    reduction.CAUSE,
    residual.CAUSE,
)
DOMAIN_CAUSES: tuple[Cause, ...] = (
    buffers.CAUSE,
    masked_row.CAUSE,
    log_sigmoid.CAUSE,
    log_softmax.CAUSE,
    epsilon.CAUSE,
    cancellation.CAUSE,
    domain.CAUSE,
    flushed.CAUSE,
    undefined.CAUSE,
)


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per origin that no weight explains."""
    for origin in context.record.origins:
        site = context.site[origin.site]
        if not context.from_weight(site):
            yield _finding(context, origin, site)


def _finding(context: CheckContext, origin: Origin, site: Site) -> Finding:
    overflow = context.is_overflow(origin)
    causes = OVERFLOW_CAUSES if overflow else DOMAIN_CAUSES
    reasons = ((cause, cause.applies(context, site, origin)) for cause in causes)
    cause, reason = next(((c, r) for c, r in reasons if r is not None), (None, None))
    code = cause.code if cause else ("AMP101" if overflow else "AMP103")
    text = _overflow_text(context, site) if overflow else _domain_text(context, site)
    advice = cause.advice if cause else _advice(context, site)
    number = rounded_number(context, site)
    if number is not None and number.decides:
        advice = f"compute what {number.site.id} compares in float32, where the number is not rounded"
    finding = finding_at(
        context,
        site,
        code,
        "; ".join(filter(None, (number and number.text, reason, text))),
        advice,
        severity=Severity.ERROR if context.harms(origin) else Severity.NOTE,
    )
    fate = _fate_text(context, origin)
    return replace(
        finding,
        evidence=replace(finding.evidence, step=context.step_of(origin.batch)),
        origin=True,
        batch=context.record.names.get(origin.batch),
        poisons=origin.poisons,
        fate=origin.fate,
        hidden_at=origin.hidden_at,
        cause=f"{finding.cause}; {fate}" if fate else finding.cause,
    )


def _fate_text(context: CheckContext, origin: Origin) -> str:
    """Describe what hides the value again: finite does not mean correct."""
    if origin.fate != "recovered":
        return ""
    where = origin.hidden_at[0]
    if not context.harms(origin):
        return f"{where} makes it finite again, with the right values"
    if not origin.harms:
        return f"{where} makes it finite again, which the FP32 model does not run: no NaN shows it"
    return (
        f"{where} makes it finite again, and wrong ({origin.hidden_sqnr_db or 0.0:.0f} dB against FP32): "
        "no NaN shows it"
    )


def _overflow_text(context: CheckContext, site: Site) -> str:
    form, seen = context.number_format, context.observed(site.id)
    what = (
        f"in FP32 the values reach {format_number(seen.ref_peak)}; "
        f"{form.name} ends at {format_number(form.max)}"
    )
    if site.role is Role.INSERTED_CAST:
        return f"{what}, and the policy casts this input to {form.name}"
    if site.decision.rule is None:
        return f"{what}, and no rule of the policy keeps this op in float32"
    return f"{what}; rule {site.decision.rule} runs this op in {form.name}"


def _domain_text(context: CheckContext, site: Site) -> str:
    seen = context.observed(site.id)
    became = "NaN" if seen.nan else "infinite"
    return (
        f"values up to {format_number(seen.bad_ref_peak)} in FP32 "
        f"became {became} in {context.number_format.name}"
    )


def _advice(context: CheckContext, site: Site) -> str:
    where = f"layer {site.layer!r}" if site.layer else "this op"
    peak, form = context.observed(site.id).ref_peak, context.number_format
    fits = form != BFLOAT16 and peak <= BFLOAT16.max and not names_dtype(site)
    other = ", or use --dtype bfloat16 (range of float32)" if fits else ""
    return f"try a rule that keeps {where} in float32{other}"


CHECK = Check("AMP101", find)
