"""AMP706: a backward or hook of the author's own that no trace can follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.checks.gradient_evidence import gradient_finding
from ampaudit.checks.interface import Check, CheckContext, source_of
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """One finding for each; a note where it runs as a whole."""
    record = context.record.gradients
    for way in record.unfollowed if record is not None else ():
        site = context.site[way.site]
        if way.as_whole:
            cause = f"{way.name} runs as a whole, for no trace can follow it: {way.reason}"
            advice = "its result is audited; what overflows inside it is not named"
        else:
            cause = f"no gradient is known before {way.name}, which no trace can follow: {way.reason}"
            advice = "use torch.where or torch.clamp in it instead of Python's control flow and .item()"
        severity = Severity.NOTE if way.as_whole else Severity.WARNING
        made = gradient_finding(context, site, "AMP706", None, cause, advice, severity=severity)
        source = source_of(replace(site, source=way.source, caller=None)) if way.source is not None else None
        yield replace(made, source=source or made.source)


CHECK = Check("AMP706", find)
