"""Builds the context of checks from an audit."""

from __future__ import annotations

from ampaudit.audit.checks.interface import CheckContext
from ampaudit.audit.config import ScanConfig
from ampaudit.bounds import BoundTable
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.run.audit import Audit
from ampaudit.run.contract import parse_contract
from ampaudit.run.weights import WeightRange, weight_ranges
from ampaudit.trace.flow import Flow

__all__ = ["context_of"]


def context_of(
    audit: Audit, form: NumberFormat, settings: ScanConfig, bounds: BoundTable | None = None
) -> CheckContext:
    """Build the context of one audit under a number format."""
    contract = parse_contract(settings.contract)
    return CheckContext(
        sites=audit.sites,
        record=audit.record,
        flow=Flow(*(converted.traced for converted in audit.every)),
        number_format=form,
        parameter_free=audit.parameter_free,
        weights=() if settings.ranges else _weights(audit),
        users=_weight_users(audit),
        min_headroom=settings.min_headroom,
        min_sqnr=settings.min_sqnr,
        ranges_only=settings.ranges,
        bounds=bounds,
        fused=contract.fused,
        saturating="saturate" in contract.words,
        step_count=settings.steps,
    )


def _weights(audit: Audit) -> tuple[WeightRange, ...]:
    """Return the ranges of 16-bit weights; those measured in the run are not read again."""
    stats = audit.record.observations
    peaks = {s.weight: stats[s.id].ref_peak for s in audit.sites if s.weight is not None and s.id in stats}
    ranges = (each for converted in audit.every for each in weight_ranges(converted, peaks))
    return tuple({each.name: each for each in ranges}.values())


def _weight_users(audit: Audit) -> dict[SiteId, tuple[str, ...]]:
    """Map each site to the 16-bit weights that it uses directly."""
    users: dict[SiteId, tuple[str, ...]] = {}
    for converted in audit.every:
        copies = {copy.node: copy.name for copy in converted.copies.values()}
        nodes = {node.name: node for node in converted.traced.graph.nodes}
        for site in converted.traced.sites:
            sources = nodes[site.node].all_input_nodes
            users.setdefault(site.id, tuple(copies[n.name] for n in sources if n.name in copies))
    return users
