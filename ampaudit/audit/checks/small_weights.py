"""AMP402: weight values that vanish or become subnormal in 16 bits; AMP403 for a running variance."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.audit.checks.weights import weight_finding
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.weights import WeightRange

__all__ = ["CHECK"]

VANISH_SHARE = 0.01
SUBNORMAL_SHARE = 0.25


def find(context: CheckContext) -> Iterator[Finding]:
    """Find weights that lose a relevant share of their values; counts are exact."""
    for weight in context.weights:
        if weight.name in context.broken_weights or not weight.nonzero:
            continue
        variance = weight.name.endswith("running_var")
        vanish, small = weight.vanish / weight.nonzero, weight.subnormal / weight.nonzero
        if variance and weight.vanish + weight.subnormal:
            advice = "keep BatchNorm statistics in float32, or fold them into the convolution"
            yield weight_finding(
                context, weight, "AMP403", _text(context, weight), advice, severity=Severity.WARNING
            )
        elif vanish > VANISH_SHARE or small > SUBNORMAL_SHARE:
            severity = None if vanish > VANISH_SHARE else Severity.NOTE
            advice = f"keep {weight.name} in float32, or rescale it by a power of two"
            yield weight_finding(context, weight, "AMP402", _text(context, weight), advice, severity=severity)


def _text(context: CheckContext, weight: WeightRange) -> str:
    form = context.number_format
    lost = f"{weight.vanish} become 0 and {weight.subnormal} subnormal"
    limit = format_number(form.min_normal)
    return f"of {weight.nonzero} non-zero values of {weight.name}, {lost} in {form.name} (below {limit})"


CHECK = Check("AMP402", find)
