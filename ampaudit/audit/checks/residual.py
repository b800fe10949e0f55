"""AMP109: a residual stream that grows from block to block until it leaves the range."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.core.text import format_number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op adds to a value that is itself the result of such an add."""
    del origin
    flow = context.flow
    nodes = flow.node(site).all_input_nodes
    if flow.base(site) != "add" or len(nodes) != 2 or any(flow.is_weight(node) for node in nodes):
        return None
    stream = next((flow.made_by(node, "add") for node in nodes if flow.made_by(node, "add")), None)
    if stream is None or context.observed(stream.id).bad:
        return None
    peak = format_number(context.observed(stream.id).ref_peak)
    return f"the stream comes with {peak} from {stream.id} and grows here"


CAUSE = Cause(
    "AMP109",
    applies,
    "keep the residual stream in float32 (the adds alone cost little), or use bfloat16",
)
