"""AMP202: an eps that rounds to zero in the 16-bit format."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampaudit.audit.checks.interface import Cause, Check, CheckContext, finding_at
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE", "CHECK", "lost_eps"]

_PROTECTED = ("div", "log", "log2", "log10", "rsqrt", "sqrt", "reciprocal", "pow", "floor_divide")
_PROTECTING = ("add", "clamp", "clamp_min", "clip", "maximum", "max", "sub")
_ADVICE = (
    "use an eps that the format holds (1e-5 or more in float16), "
    "or compute this step and what reads it in float32"
)


def find(context: CheckContext) -> Iterator[Finding]:
    """Find every lost eps before a division, root or logarithm; a subnormal one is a note."""
    form = context.number_format
    for site in context.low_precision_sites:
        eps = _eps(context, site)
        guarded = context.flow.leads_to(site, *_PROTECTED) if eps is not None else None
        if eps is None or guarded is None or guarded.id in context.origin_sites:
            continue
        lost = eps <= form.flush_below
        became = "0" if lost else f"subnormal, good to {math.log2(eps / form.min_subnormal):.0f} bits"
        cause = f"eps = {format_number(eps)} is {became} in {form.name}, and {guarded.id} relies on it"
        severity = Severity.WARNING if lost else Severity.NOTE
        yield finding_at(context, site, "AMP202", cause, _ADVICE, severity=severity, confidence="rule")


def _eps(context: CheckContext, site: Site) -> float | None:
    """Return the Python number below the smallest normal number that an op adds or clamps to."""
    if context.flow.base(site) not in _PROTECTING:
        return None
    given = context.flow.arguments(site)
    numbers = [given.get(name) for name in ("other", "min", "alpha")]
    numbers += [site.original_args.get(1), site.original_args.get("min")]
    form = context.number_format
    small = [v for v in numbers if isinstance(v, float) and 0.0 < abs(v) < form.min_normal]
    return abs(small[0]) if small else None


def lost_eps(context: CheckContext, site: Site) -> tuple[Site, float] | None:
    """Return the lost eps shortly before a division, root or logarithm, and the op that adds it."""
    flow = context.flow
    if flow.base(site) not in _PROTECTED:
        return None
    frontier = [site]
    for _ in range(3):
        frontier = [maker for step in frontier for maker in flow.makers(step)]
        for maker in frontier:
            eps = _eps(context, maker) if context.low_precision(maker) else None
            if eps is not None:
                return maker, eps
    return None


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op is a division, root or logarithm shortly after a lost eps."""
    found = lost_eps(context, site)
    if found is None:
        return None
    maker, eps = found
    lost = eps <= context.number_format.flush_below
    if not lost and context.is_overflow(origin):  # the value would overflow with the exact eps as well
        return None
    became = "0" if lost else "subnormal"
    return f"eps = {format_number(eps)} at {maker.id} is {became} in {context.number_format.name}"


CAUSE = Cause("AMP202", applies, _ADVICE)
CHECK = Check("AMP202", find)
