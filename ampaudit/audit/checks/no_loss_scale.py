"""AMP703: no loss scale suits both the layer with the largest and that with the smallest gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.gradient_evidence import VANISHED
from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_power
from ampaudit.report.finding import Finding
from ampaudit.run.backward.scale import advice_on_scale

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Report whether, at every scale without overflow, some layer loses most of its gradient."""
    record, form = context.record.gradients, context.number_format
    if record is None:
        return
    counted = [gradient for gradient in context.gradients if not gradient.stats.cancelled]
    found = advice_on_scale(counted, form, record.scale, share=VANISHED)
    if found is None or found.exists:
        return
    low, high = found.low_at or "(top module)", found.high_at or "(top module)"
    cause = (
        f"the gradients of {high} overflow from 2^{found.high + 1} on; those of {low} need "
        f"{format_power(found.low)} for half of them not to be zero in {form.name}"
    )
    advice = f"keep {high} or {low} in float32, use bfloat16, or bring their gradients closer together"
    made = finding_about(
        "AMP703", SiteId(f"{low}/gradient"), found.low_at, cause, advice, confidence="observed"
    )
    yield replace(made, phase="backward")


CHECK = Check("AMP703", find)
