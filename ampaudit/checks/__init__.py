"""Checks turn a run's record into findings; one file per check.

Adding one: write a module with ``CHECK = Check(code, title, find)`` and list it in ``ALL_CHECKS``.
"""

from __future__ import annotations

from ampaudit.checks import domain, forbidden, headroom, mask, overflow, uncovered, weights, what_if
from ampaudit.checks.finding import Evidence, Finding, Severity, Source
from ampaudit.checks.interface import Check, CheckContext

__all__ = ["ALL_CHECKS", "Check", "CheckContext", "Evidence", "Finding", "Severity", "Source", "run_checks"]

ALL_CHECKS: tuple[Check, ...] = (
    overflow.CHECK,
    domain.CHECK,
    weights.CHECK,
    forbidden.CHECK,
    headroom.CHECK,
    what_if.CHECK,
    mask.CHECK,
    uncovered.CHECK,
)


def run_checks(context: CheckContext) -> tuple[Finding, ...]:
    """All findings, the gravest first, then in graph order."""
    order = {site.id: position for position, site in enumerate(context.sites)}
    found = [finding for check in ALL_CHECKS for finding in check.find(context)]
    return tuple(sorted(found, key=lambda f: (-f.severity.rank, order.get(f.site, -1), f.code, f.layer)))
