"""AMP101: a value leaves the range of the 16-bit format and becomes infinite."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.interface import Check, CheckContext, as_origin, finding_at, number
from ampaudit.trace import Role, Site

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Origins whose wrong elements were beyond the format in FP32."""
    for origin in context.record.origins:
        site = context.site[origin.site]
        if not context.is_overflow(origin) or context.from_weight(site):
            continue
        constant = site.id in context.parameter_free
        finding = finding_at(
            context,
            site,
            "AMP101",
            "constant" if constant else "overflow",
            Severity.ERROR,
            _cause(context, site),
            _advice(context, site),
        )
        yield as_origin(finding, origin)


def _cause(context: CheckContext, site: Site) -> str:
    form, seen = context.number_format, context.observed(site.id)
    what = f"in FP32 the values reach {number(seen.bad_ref_peak)}; {form.name} ends at {number(form.max)}"
    if site.role is Role.INSERTED_CAST:
        return f"{what}, and the policy casts this input to {form.name}"
    if site.decision.rule is None:
        return f"{what}, and no rule of the policy keeps this op in float32"
    return f"{what}; rule {site.decision.rule} lowers this op"


def _advice(context: CheckContext, site: Site) -> str:
    where = f"layer {site.layer!r}" if site.layer else "this op"
    other = "" if context.number_format.name == "bfloat16" else ", or use --dtype bfloat16 (range of float32)"
    return f"try a rule that keeps {where} in float32{other}"


CHECK = Check("AMP101", "overflow", find)
