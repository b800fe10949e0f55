"""AMP103: NaN or infinity without a large value: a division by zero, log of zero, inf - inf and the like."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.interface import Check, CheckContext, as_origin, finding_at, number

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Origins whose wrong elements were ordinary numbers in FP32."""
    form = context.number_format
    for origin in context.record.origins:
        site = context.site[origin.site]
        if context.is_overflow(origin) or context.from_weight(site):
            continue
        seen = context.observed(site.id)
        became = "NaN" if seen.nan else "infinite"
        cause = (
            f"values up to {number(seen.bad_ref_peak)} in FP32 became {became}: an input of this op rounds "
            f"to zero or out of its domain in {form.name} (none below {number(form.min_subnormal)} is kept)"
        )
        advice = (
            f"look for a small eps, a difference or a probability among the inputs; keep {site.id} in float32"
        )
        finding = finding_at(
            context, site, "AMP103", "nan" if seen.nan else "domain", Severity.ERROR, cause, advice
        )
        yield as_origin(finding, origin)


CHECK = Check("AMP103", "result out of the domain of its op", find)
