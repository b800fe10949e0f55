"""AMP204: log(1 - sigmoid(x)), or log(sigmoid(x)): sigmoid rounds to 1 or 0, and the log is -inf."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checks.finding import Finding, Severity
from ampaudit.checks.interface import Cause, Check, CheckContext, finding_at, number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE", "CHECK"]

_ADVICE = "write F.logsigmoid(-x) for log(1 - sigmoid(x)), F.logsigmoid(x) for log(sigmoid(x))"


def applies(context: CheckContext, site: Site, origin: Origin | None) -> str | None:
    """A log of a sigmoid, or of one minus it, with one of the steps before it in 16 bits."""
    del origin
    flow = context.flow
    if flow.base(site) not in ("log", "log1p", "log2", "log10"):
        return None
    node = flow.node(site).all_input_nodes[0]
    between = flow.made_by(node, "rsub", "sub", "neg", "add", "clamp", "clamp_min")
    sigmoid = flow.comes_from(node, "sigmoid", within=3)
    if sigmoid is None or not any(s is not None and context.lowered(s) for s in (sigmoid, between)):
        return None
    bits = context.number_format.fraction_bits
    edge = (bits + 1 + 1) * 0.6931
    return f"1 - sigmoid(x) rounds to 0 in {context.number_format.name} from x = {number(edge)} on"


def find(context: CheckContext) -> Iterator[Finding]:
    """The pattern in 16 bits where this input did not break it: another one will."""
    for site in context.graph_sites:
        reason = applies(context, site, None)
        if reason and site.id not in context.origin_sites:
            yield finding_at(
                context, site, "AMP204", reason, _ADVICE, severity=Severity.WARNING, confidence="rule"
            )


CAUSE = Cause("AMP204", applies, _ADVICE)
CHECK = Check("AMP204", find)
