"""AMP111: a clamp or another bounded op that hides an overflow behind a finite, often wrong value."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]

_HIDING = frozenset(
    """
    clamp clamp_max clamp_min clip minimum maximum nan_to_num hardtanh
    relu6 tanh sigmoid where hardsigmoid hardswish
    """.split()
)


def find(context: CheckContext) -> Iterator[Finding]:
    """Find bounded ops that turn the infinity of an origin into finite values."""
    for origin in context.record.origins:
        for hidden in origin.hidden_at:
            site = context.site[hidden]
            if context.flow.base(site) not in _HIDING:
                continue
            db = origin.hidden_sqnr_db
            right = db is None or db >= context.min_sqnr
            how = "with the right values" if right else f"and wrong ({db:.0f} dB against FP32)"
            yield finding_at(
                context,
                site,
                "AMP111",
                f"{origin.site} overflows, and this op makes it finite again, {how}",
                "cure the overflow where it happens; a limit in 16 bits only hides it",
                severity=Severity.NOTE if right else Severity.WARNING,
            )


CHECK = Check("AMP111", find)
