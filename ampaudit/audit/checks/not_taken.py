"""AMP903: parts of the model that this input did not use."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, some_sites
from ampaudit.core.sites import SiteId
from ampaudit.report.finding import Finding
from ampaudit.trace.graph import Slot

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note about all layers with parameters that were not used."""
    traced = context.flow.traced
    nodes = {node.name: node for node in traced.graph.nodes}
    used: set[str] = set()
    idle: dict[str, None] = {}
    tied = {id(tensor) for name, tensor in traced.tensors.items() if nodes[name].users}
    for place in traced.placeholders:
        if place.slot is not Slot.PARAMETER:
            continue
        layer = place.name.rpartition(".")[0]
        if nodes[place.node].users or id(traced.tensors[place.node]) in tied:
            used.add(layer)
        else:
            idle[layer] = None
    layers = [layer for layer in idle if layer not in used]
    if layers:
        site = SiteId(f"{layers[0] or '(top)'}/unused")
        count = f"{len(layers)} layer{'s' if len(layers) != 1 else ''} with parameters"
        cause = f"this input does not use {count}: {some_sites(layers, 5)}"
        advice = "also scan an input that takes those branches"
        yield finding_about("AMP903", site, layers[0], cause, advice)


CHECK = Check("AMP903", find)
