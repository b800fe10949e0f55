"""AMP207: an output of the model is less accurate than asked for, with nothing infinite on the way."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.accuracy import worst_sites
from ampaudit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Outputs below the threshold, with the ops that lose most by themselves."""
    if context.record.origins or context.broken_weights or context.ranges_only:
        return
    for name, made, accuracy in context.outputs:
        if made is None or accuracy is None or accuracy >= context.min_sqnr:
            continue
        worst = worst_sites(context)
        seen = context.observed
        own = ", ".join(f"{site.id} ({seen(site.id).local_sqnr_db:.0f} dB alone)" for site in worst)
        cause = f"{name} has {accuracy:.0f} dB against FP32; {context.min_sqnr:.0f} dB were asked for"
        advice = (
            f"the ops that lose most by themselves: {own}"
            if own
            else "try --dtype float16, or a wider policy"
        )
        yield finding_at(context, context.site[made], "AMP207", cause, advice)


CHECK = Check("AMP207", find)
