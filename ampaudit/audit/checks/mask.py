"""AMP104: a mask value that became -inf, which a softmax turns into zeros as intended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find saturated masks: harmless here, NaN in a fully masked row."""
    for site in context.sites:
        if site.id in context.record.masks:
            cause = "a mask value rounds to -inf; every value that depends on it came out finite"
            advice = "nothing to do unless a whole row can be masked; then use torch.finfo(x.dtype).min"
            yield replace(finding_at(context, site, "AMP104", cause, advice), fate="intended")


CHECK = Check("AMP104", find)
