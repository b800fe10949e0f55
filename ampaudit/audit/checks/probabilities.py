"""AMP304: binary cross entropy on probabilities that a 16-bit sigmoid has rounded to 0 or 1."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.policy.schema import Cast
from ampaudit.report.finding import Finding

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find ``binary_cross_entropy`` with 16-bit input, unless the policy forbids it anyway (AMP601)."""
    for site in context.graph_sites:
        if context.flow.base(site) != "binary_cross_entropy" or site.decision.cast is Cast.FORBID:
            continue
        made = context.flow.maker(context.flow.node(site).all_input_nodes[0])
        if context.low_precision(site) or (made is not None and context.low_precision(made)):
            cause = f"a probability in {context.number_format.name} is 1 long before its logit is large"
            advice = "pass the logits to binary_cross_entropy_with_logits"
            yield finding_at(context, site, "AMP304", cause, advice, confidence="rule")


CHECK = Check("AMP304", find)
