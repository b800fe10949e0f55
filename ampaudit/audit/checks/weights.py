"""AMP401: a parameter, buffer or constant that overflows in 16 bits."""

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

__all__ = ["CHECK", "weight_finding"]


def find(context: CheckContext) -> Iterator[Finding]:
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
        harmless = not weight.parameter and not explained and _users_are_right(context, weight.name)
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


def _users_are_right(context: CheckContext, name: str) -> bool:
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
    made = finding_about(code, site, layer, cause, advice, severity=severity)
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
        made,
        phase="weights",
        op="cast",
        source=finding_source(first) if first else None,
        evidence=evidence,
        origin=made.severity is Severity.ERROR,
        poisons=poisons,
    )


CHECK = Check("AMP401", find)
