"""AMP706: a custom backward or hook that cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.gradient_evidence import gradient_finding
from ampaudit.audit.checks.interface import Check, CheckContext, finding_source
from ampaudit.report.finding import Finding, Severity

__all__ = ["CHECK"]

_FOLLOWABLE = "use torch.where or torch.clamp in it instead of Python's control flow and .item()"
_TEXTS = {
    "": ("no gradient is known before {}, which no trace can follow", _FOLLOWABLE),
    "left out": ("gradients are audited as if there were no {}, which no trace can follow", _FOLLOWABLE),
    "as a whole": (
        "{} runs as a whole, because no trace can follow it",
        "its result is audited; an overflow inside it is not located",
    ),
}


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding for each; a note if it could be run as a whole."""
    record = context.record.gradients
    for custom in record.untraced if record is not None else ():
        site = context.site[custom.site]
        cause, advice = _TEXTS[custom.instead]
        cause = f"{cause.format(custom.name)}: {custom.reason}"
        if "same dtype" in custom.reason:
            advice = "it fails in training as well: decorate it with torch.amp.custom_fwd and custom_bwd"
        severity = Severity.NOTE if custom.instead == "as a whole" else Severity.WARNING
        made = gradient_finding(context, site, "AMP706", None, cause, advice, severity=severity)
        if custom.source is not None:
            made = replace(made, source=finding_source(replace(site, source=custom.source, caller=None)))
        yield made


CHECK = Check("AMP706", find)
