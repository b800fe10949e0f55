"""AMP205: a small difference of nearly equal values, which is mostly rounding error."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.accuracy import local_error_matters
from ampaudit.audit.checks.interface import Cause, Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE", "CHECK", "subtracts"]

_ADVICE = "subtract in float32, or rewrite: ((x - x.mean())**2).mean() for E[x^2] - E[x]^2, log1p, expm1"
_DIFFERENCES = ("sub", "rsub", "add")


def subtracts(context: CheckContext, site: Site) -> bool:
    """Return whether a site is a sum or difference much smaller than its operands."""
    if context.flow.base(site) not in _DIFFERENCES:
        return False
    seen = context.observed(site.id)
    peaks = [context.observed(maker.id).ref_peak for maker in context.flow.makers(site)]
    numbers = [v for v in context.flow.arguments(site).values() if isinstance(v, int | float)]
    largest = max((*peaks, *(abs(float(v)) for v in numbers)), default=0.0)
    return largest > 8 * _typical(seen.ref_sq, seen.elements, seen.ref_peak)


def _typical(squares: float, elements: int, peak: float) -> float:
    """Return the root mean square, or the peak if it was not measured."""
    return float((squares / elements) ** 0.5) if squares and elements else peak


def find(context: CheckContext) -> Iterator[Finding]:
    """Find differences that are mostly rounding error."""
    for site in context.low_precision_sites:
        if site.id in context.origin_sites or not subtracts(context, site):
            continue
        severity = local_error_matters(context, site)
        if severity is not None:
            db = context.observed(site.id).local_sqnr_db
            cause = f"both operands are large and nearly equal; {db:.0f} dB of their difference are right"
            yield finding_at(context, site, "AMP205", cause, _ADVICE, severity=severity)


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether a root, logarithm or division takes the difference of two nearly equal values."""
    del origin
    frontier = [site]
    for _ in range(3):
        frontier = [maker for step in frontier for maker in context.flow.makers(step)]
        for maker in frontier:
            peaks = [context.observed(m.id).ref_peak for m in context.flow.makers(maker)]
            if len(peaks) == 2 and context.flow.base(maker) in ("sub", "rsub"):
                return (
                    f"{maker.id} is a difference of values up to "
                    f"{format_number(max(peaks))} that nearly cancel"
                )
    return None


CAUSE = Cause("AMP205", applies, _ADVICE)
CHECK = Check("AMP205", find)
