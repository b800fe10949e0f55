"""Weights that the format cannot hold, and tied weights that get two dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, finding_source
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Evidence, Finding, Severity
from ampaudit.run.weights import WeightRange
from ampaudit.trace import Site

__all__ = ["CHECKS", "weight_finding"]

VANISH_SHARE = 0.01
SUBNORMAL_SHARE = 0.25


def find_weights(context: CheckContext) -> Iterator[Finding]:
    """Yield one finding per weight; the origins that it explains are listed as poisoned.

    A buffer that overflows without consequence (a mask whose -inf a softmax makes zero) is a note.
    """
    form = context.number_format
    origins = [(origin, context.site[origin.site]) for origin in context.record.origins]
    for weight in context.weights:
        if weight.name not in context.broken_weights:
            continue
        explained = [(o, s) for o, s in origins if context.from_weight(s) == weight.name]
        poisons = dict.fromkeys(p for o, s in explained for p in (s.id, *o.poisons))
        harmless = not weight.parameter and not explained and _users_are_accurate(context, weight.name)
        first: Site | None = explained[0][1] if explained else None
        variance = weight.name.endswith("running_var")
        text = (
            f"{weight.name} holds {format_number(weight.peak)}; {form.name} ends at {format_number(form.max)}"
        )
        count = f"; {weight.overflow} of {weight.elements} elements become inf"
        yield weight_finding(
            context,
            weight,
            "AMP403" if variance else "AMP401",
            text + count + ("; every value that depends on it came out finite" if harmless else ""),
            f"keep {weight.name} in float32, or rescale it",
            severity=Severity.NOTE if harmless else Severity.ERROR,
            first=first,
            poisons=tuple(p for p in poisons if first is None or p != first.id),
        )


def _users_are_accurate(context: CheckContext, name: str) -> bool:
    """Return whether every op that uses a weight is accurate nevertheless."""
    users = [site for site, names in context.users.items() if name in names]
    accuracies = [db for site in users if (db := context.observed(site).sqnr_db) is not None]
    return min(accuracies, default=math.inf) >= context.min_sqnr


def weight_finding(
    context: CheckContext,
    weight: WeightRange,
    code: str,
    cause: str,
    advice: str,
    *,
    severity: Severity | None = None,
    first: Site | None = None,
    poisons: tuple[SiteId, ...] = (),
) -> Finding:
    """Return a finding about a weight, at the first site where it shows or at the weight itself."""
    form = context.number_format
    site = first.id if first else SiteId(f"{weight.name}/stored")
    layer = weight.name.rpartition(".")[0]
    finding = finding_about(code, site, layer, cause, advice, severity=severity)
    evidence = Evidence(
        peak=weight.peak,
        limit=form.max,
        inf=weight.overflow,
        elements=weight.elements,
        headroom_bits=form.headroom_bits(weight.peak) if weight.peak else None,
        flushed=weight.vanish / weight.nonzero if weight.nonzero else 0.0,
        subnormal=weight.subnormal / weight.nonzero if weight.nonzero else 0.0,
    )
    return replace(
        finding,
        phase="weights",
        op="cast",
        source=finding_source(first) if first else None,
        evidence=evidence,
        origin=finding.severity is Severity.ERROR,
        poisons=poisons,
    )


def find_small_weights(context: CheckContext) -> Iterator[Finding]:
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
    losses = f"{weight.vanish} become 0 and {weight.subnormal} subnormal"
    limit = format_number(form.min_normal)
    return f"of {weight.nonzero} non-zero values of {weight.name}, {losses} in {form.name} (below {limit})"


def find_tied_weights(context: CheckContext) -> Iterator[Finding]:
    """Find tied weights whose names fall under different rules."""
    for names in context.flow.traced.split_ties:
        first = names[0]
        cause = f"{' and '.join(names)} are one tensor, and the policy keeps only some of these in float32"
        advice = "give all names the same rule; the tensor was left in float32 here"
        site, layer = SiteId(f"{first}/stored"), first.rpartition(".")[0]
        yield finding_about("AMP404", site, layer, cause, advice, confidence="rule")


CHECKS = (
    Check("AMP401", find_weights),
    Check("AMP402", find_small_weights),
    Check("AMP404", find_tied_weights),
)
