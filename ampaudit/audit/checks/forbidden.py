"""AMP601: an op that the policy refuses to run in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.policy.schema import Cast
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find forbidden sites; the run continued in float32 so that the rest is audited."""
    for site in context.sites:
        if site.decision.cast is Cast.FORBID and site.decision.explicit:
            cause = f"rule {site.decision.rule} forbids {site.op}: {site.decision.why}"
            advice = "replace the op; under real autocast this line raises an error"
            yield finding_at(context, site, "AMP601", cause, advice)


CHECK = Check("AMP601", find)
