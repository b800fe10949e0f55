"""AMP702: a gradient that is flushed to zero, so that the layers behind it do not learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampaudit.audit.checks.gradient_evidence import gradient_finding, name_of, vanishes
from ampaudit.audit.checks.interface import Check, CheckContext
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number, format_power, format_scale
from ampaudit.report.finding import Finding, Severity
from ampaudit.run.backward.record import GradientRecord, GradientStats
from ampaudit.trace import Site

__all__ = ["CHECK"]

_NOTHING_LEFT_DB = 6.0  # half of the gradient is gone


def find(context: CheckContext) -> Iterator[Finding]:
    """Find where gradients begin to vanish in the backward pass, and list those that follow."""
    record = context.record.gradients
    if record is None:
        return
    behind: dict[SiteId, list[SiteId]] = {}
    starts: dict[SiteId, SiteId] = {}
    for site in reversed(context.graph_sites):
        stats = record.sites.get(site.id)
        before = next((starts[r.id] for r in context.flow.readers(site) if r.id in starts), None)
        if stats is None and before is not None:
            starts[site.id] = before  # it only hands on
        if stats is None or not vanishes(stats):
            continue
        starts[site.id] = before or site.id
        behind.setdefault(starts[site.id], []).append(site.id)
    for start in reversed(list(behind)):
        others = tuple(other for other in behind[start] if other != start)
        name = name_of(context, start, False)
        yield _made(context, record, context.site[start], record.sites[start], name, others)
    yield from _parameters(context, record, set(starts))


def _parameters(context: CheckContext, record: GradientRecord, known: set[SiteId]) -> Iterator[Finding]:
    """Return parameters stored in 16 bits whose gradient vanishes first."""
    for name, stats in record.parameters.items():
        site = next((s for s in context.graph_sites if _uses(context, s, name)), None)
        if vanishes(stats) and site is not None and site.id not in known:
            yield _made(context, record, site, stats, name, ())


def _uses(context: CheckContext, site: Site, parameter: str) -> bool:
    return any(
        place is not None and place.name == parameter
        for place in map(context.flow.given, context.flow.node(site).all_input_nodes)
    )


def _made(
    context: CheckContext,
    record: GradientRecord,
    site: Site,
    stats: GradientStats,
    name: str,
    others: tuple[SiteId, ...],
) -> Finding:
    form = context.number_format
    at = (
        f" under the loss scale {format_scale(record.scale)}"
        if record.scale != 1
        else " without loss scaling"
    )
    cause = (
        f"{stats.flushed_share:.0%} of the gradient of {name} becomes zero in {form.name}{at}: its largest "
        f"element is {format_number(stats.peak)} in FP32; "
        f"{format_number(form.flush_below / record.scale)} and less is lost"
    )
    sqnr = stats.values.sqnr_db
    severity = Severity.ERROR if sqnr is not None and sqnr < _NOTHING_LEFT_DB else Severity.WARNING
    made = gradient_finding(
        context, site, "AMP702", stats, cause, _advice(context, record), name=name, severity=severity
    )
    return replace(made, poisons=others)


def _advice(context: CheckContext, record: GradientRecord) -> str:
    found = context.scale_advice
    if found is not None and found.exists and 2.0**found.low > record.scale:
        return (
            f"use a loss scale of at least {format_power(found.low)}; "
            f"nothing overflows up to {format_power(found.high)}"
        )
    return "keep the layers behind it in float32, or use bfloat16: no loss scale suits all layers"


CHECK = Check("AMP702", find)
