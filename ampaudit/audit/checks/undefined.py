"""AMP114: inf - inf, 0/0 or 0 * inf: two valid values that make NaN together."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_PAIRS = {"sub": "inf - inf", "add": "inf - inf", "mul": "0 * inf", "matmul": "0 * inf", "bmm": "0 * inf"}


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op gives NaN although it is defined for every pair of finite numbers."""
    del origin
    base = context.flow.base(site)
    return f"{_PAIRS[base]} in 16 bits" if base in _PAIRS and context.observed(site.id).nan else None


CAUSE = Cause("AMP114", applies, "look for a sentinel or mask among the inputs; use a finite one")
