"""What checks look at, put together from an audit."""

from __future__ import annotations

from ampaudit.bounds import SpanTable
from ampaudit.checks.interface import CheckContext
from ampaudit.formats import NumberFormat
from ampaudit.run.audit import Audit
from ampaudit.run.contract import contract_of
from ampaudit.run.weights import weight_ranges
from ampaudit.sites import SiteId
from ampaudit.trace.flow import Flow
from ampaudit.workflows.settings import Settings

__all__ = ["context_of"]


def context_of(
    audit: Audit, form: NumberFormat, settings: Settings, bounds: SpanTable | None = None
) -> CheckContext:
    """The context of one audit under a number format."""
    contract = contract_of(settings.contract)
    return CheckContext(
        sites=audit.sites,
        record=audit.record,
        flow=Flow(audit.converted.traced),
        number_format=form,
        parameter_free=audit.parameter_free,
        weights=() if settings.ranges else weight_ranges(audit.converted, _weight_peaks(audit)),
        users=_weight_users(audit),
        min_headroom=settings.min_headroom,
        min_sqnr=settings.min_sqnr,
        ranges_only=settings.ranges,
        bounds=bounds,
        fused=contract.fused,
        saturating="saturate" in contract.words,
    )


def _weight_peaks(audit: Audit) -> dict[str, float]:
    """Peaks of the weights that are cast in the graph: the run measured them."""
    seen = audit.record.observations
    return {s.weight: seen[s.id].ref_peak for s in audit.sites if s.weight is not None and s.id in seen}


def _weight_users(audit: Audit) -> dict[SiteId, tuple[str, ...]]:
    """For each site, the weights held in 16 bits that it uses directly."""
    copies = {copy.node: copy.name for copy in audit.converted.copies.values()}
    nodes = {node.name: node for node in audit.converted.traced.graph.nodes}
    return {
        site.id: tuple(copies[used.name] for used in nodes[site.node].all_input_nodes if used.name in copies)
        for site in audit.converted.traced.sites
    }
