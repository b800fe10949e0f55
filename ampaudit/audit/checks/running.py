"""Runs checks one by one; a check that raises becomes a finding and never hides the others."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.report.finding import CRASHED, Finding, Severity

__all__ = ["run_checks"]


def run_checks(context: CheckContext, checks: Iterable[Check]) -> tuple[Finding, ...]:
    """Return all findings, the gravest first, in graph order.

    Errors about finite values come after others, which may be their cause; of warnings about precision the
    worst comes first.
    """
    order = {site.id: position for position, site in enumerate(context.sites)}
    found = [finding for check in checks for finding in _found(check, context)]

    def rank(finding: Finding) -> tuple[float, bool, float, int, str, str]:
        own = finding.evidence.local_sqnr_db if finding.kind == "precision" else None
        accuracy = own if own is not None else 1e3
        wrong = finding.severity is Severity.ERROR and finding.finite
        return (
            -finding.severity.rank,
            wrong,
            accuracy,
            order.get(finding.site, -1),
            finding.code,
            finding.layer,
        )

    return tuple(sorted(found, key=rank))


def _found(check: Check, context: CheckContext) -> list[Finding]:
    try:
        return list(check.find(context))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else "no message"
        place = f"{last.name}, line {last.lineno}"
        cause = f"check {check.code} itself failed: {type(error).__name__}: {text} ({place})"
        advice = "the other findings stand; please report this one, with the model if you can"
        return [finding_about(CRASHED, SiteId(f"{check.code}/crashed"), "", cause, advice)]
