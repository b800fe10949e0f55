"""AMP502: a value that is cast and immediately cast back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Role
from ampaudit.trace.flow import Flow

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find casts of casts, with only views between them, that end in the original dtype."""
    for site in context.graph_sites:
        if not site.role.converts or site.role is Role.WEIGHT_CAST:
            continue
        before = _behind_views(context.flow.node(site).all_input_nodes[0], context.flow)
        first = context.flow.site(before)
        if first is None or not first.role.converts or first.role is Role.WEIGHT_CAST:
            continue
        source = context.flow.node(first).all_input_nodes[0].meta.get("val")
        if getattr(source, "dtype", None) == site.dtype != first.dtype:
            cause = (
                f"{first.id} casts this value, and it is cast back here: two passes over memory for nothing"
            )
            lost = " and its precision is gone" if context.low_precision(first) else ""
            advice = "give both users the same precision, so that one cast is left"
            yield finding_at(context, site, "AMP502", f"{cause}{lost}", advice, confidence="rule")


def _behind_views(node: fx.Node, flow: Flow) -> fx.Node:
    while (site := flow.site(node)) is not None and site.role is Role.VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


CHECK = Check("AMP502", find)
