"""AMP111: a clamp or another bounded op that hides an overflow behind a finite, often wrong value."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.formats import FLOAT16
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity
from ampaudit.trace import Site

__all__ = ["CHECK", "limited_peak"]

_HIDING = frozenset(
    """
    clamp clamp_max clamp_min clip minimum maximum nan_to_num hardtanh
    relu6 tanh sigmoid where hardsigmoid hardswish
    """.split()
)
_CLAMPS = frozenset("clamp clamp_max clamp_min clip minimum maximum hardtanh".split())
_NEAR = 0.9  # of float16's largest number: clamps to 64504 and 6e4 stand for its limit as well


def find(context: CheckContext) -> Iterator[Finding]:
    """Find bounded ops that make the infinity of an origin finite, and limits of float16 that act in FP32."""
    seen: set[SiteId] = set()
    for origin in context.record.origins:
        for hidden in origin.hidden_at:
            site = context.site[hidden]
            if context.flow.base(site) not in _HIDING:
                continue
            seen.add(site.id)
            db = origin.hidden_sqnr_db
            right = db is None or db >= context.min_sqnr
            how = "with the right values" if right else f"and wrong ({db:.0f} dB against FP32)"
            if site.id in context.only_in_low_precision:
                how = "which the FP32 model does not run"
            peak = limited_peak(context, site)
            if peak is not None:
                how = f"{how}; in FP32 it limits {format_number(peak)} as well"
            yield finding_at(
                context,
                site,
                "AMP111",
                f"{origin.site} overflows, and this op makes it finite again, {how}",
                "cure the overflow where it happens; a limit in 16 bits only hides it",
                severity=Severity.NOTE if right and peak is None else Severity.WARNING,
            )
    for site in context.graph_sites:
        peak = limited_peak(context, site) if site.id not in seen else None
        if peak is not None:
            limit = format_number(context.observed(site.id).ref_peak)
            yield finding_at(
                context,
                site,
                "AMP111",
                f"in FP32 the values reach {format_number(peak)}, and this op limits them to {limit}",
                "a limit for float16 changes what the model computes; scale the values instead (--advise)",
            )


def limited_peak(context: CheckContext, site: Site) -> float | None:
    """Return the largest FP32 magnitude before a limit at float16's range; ``None`` if it does not act."""
    if context.flow.base(site) not in _CLAMPS:
        return None
    limit = context.observed(site.id).ref_peak
    makers = (context.observed(maker.id).ref_peak for maker in context.flow.makers(site)[:1])
    peak = next(makers, 0.0)
    at_the_end = _NEAR * FLOAT16.max <= limit < FLOAT16.overflow_at
    node = context.flow.node(site)
    bounds = [b for b in (*node.args[1:], *node.kwargs.values()) if isinstance(b, int | float)]
    if bounds and all(abs(bound) < _NEAR * FLOAT16.max for bound in bounds):
        return None  # it cuts something else, such as what is negative
    return peak if at_the_end and peak >= FLOAT16.overflow_at else None


CHECK = Check("AMP111", find)
