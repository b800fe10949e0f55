"""Runs checks one by one; a check that raises becomes a finding and never hides the others."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
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

    ordered = sorted(found, key=rank)
    return tuple(_one_per_line(ordered) if context.record.path.paths else ordered)


def _one_per_line(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings about one line of one layer: along a path, each turn of a loop has sites of its own."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        line = None if finding.source is None else (finding.source.file, finding.source.line)
        key = (finding.code, finding.layer, finding.op, finding.severity, line)
        groups.setdefault(key if line is not None else (number,), []).append(finding)
    for group in groups.values():
        worst = max(group, key=lambda finding: finding.evidence.peak or 0.0)
        sites = dict.fromkeys(site for finding in group for site in finding.poisons)
        more = f"; the same at {plural(len(group) - 1, 'more op')} of this line" if len(group) > 1 else ""
        own = {finding.site for finding in group}
        poisons = tuple(site for site in sites if site not in own)
        yield replace(worst, cause=f"{worst.cause}{more}", poisons=poisons) if more else worst


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
