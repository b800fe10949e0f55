"""AMP115: rounding moves a value out of the domain of its op, as in acos(1.001) or sqrt(-1e-4)."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "lgamma"), "negative"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv", "logit"), "beyond 1"),
    "acosh": "below 1",
}


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether an op gives NaN outside its domain, or infinity at the edge of it."""
    del origin
    base, seen = context.flow.base(site), context.observed(site.id)
    if base not in _DOMAINS:
        return None
    if seen.nan:
        return f"{base} is not defined where its input is {_DOMAINS[base]}, and rounding takes it there"
    if base in ("atanh", "erfinv", "logit"):
        return f"{base} is infinite at the end of its domain, and rounding takes its input there"
    return None


CAUSE = Cause(
    "AMP115", applies, "clamp the input to the domain, with a margin of the format's eps, or use float32 here"
)
