"""AMP401: a parameter, buffer or constant overflows when it is held in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.finding import Evidence, Finding, Severity
from ampaudit.checks.interface import Check, CheckContext, number, source_of
from ampaudit.sites import SiteId
from ampaudit.trace import Site

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """One finding per weight, with every origin that it explains among the poisoned sites.

    A buffer that overflows without consequence (a mask whose -inf a softmax makes zero) is a note.
    """
    form = context.number_format
    origins = [(origin, context.site[origin.site]) for origin in context.record.origins]
    for weight in context.weights:
        if weight.name not in context.broken_weights:
            continue
        explained = [(o, s) for o, s in origins if context.from_weight(s) == weight.name]
        poisons = dict.fromkeys(p for o, s in explained for p in (s.id, *o.poisons))
        harmless = not weight.parameter and not explained
        first: Site | None = explained[0][1] if explained else None
        yield Finding(
            code="AMP401",
            kind="weights",
            severity=Severity.NOTE if harmless else Severity.ERROR,
            confidence="observed",
            phase="weights",
            layer=weight.name.rpartition(".")[0],
            op="cast",
            site=first.id if first else SiteId(f"{weight.name}/stored"),
            source=source_of(first) if first else None,
            evidence=Evidence(
                peak=weight.peak,
                limit=form.max,
                elements=weight.elements,
                headroom_bits=form.headroom_bits(weight.peak),
            ),
            origin=not harmless,
            poisons=tuple(p for p in poisons if first is None or p != first.id),
            cause=f"{weight.name} holds {number(weight.peak)}; {form.name} ends at {number(form.max)}"
            + ("; every value that depends on it came out finite" if harmless else ""),
            advice=f"keep {weight.name} in float32, or rescale it",
        )


CHECK = Check("AMP401", "weight out of range", find)
