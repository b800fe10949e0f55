"""AMP305: an in-place op that keeps 16 bits where the out-of-place op would promote to float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace.opnames import mutated_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CHECK"]

_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "div",
    "addcmul",
    "addcdiv",
    "lerp",
    "pow",
    "copy",
    "index_add",
    "scatter_add",
)


def find(context: CheckContext) -> Iterator[Finding]:
    """Find writes of float32 values into a tensor that the policy made 16-bit."""
    for site in context.graph_sites:
        node = context.flow.node(site)
        if site.dtype not in LOW_PRECISION_DTYPES or context.flow.base(site) not in _ARITHMETIC:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or not mutated_arguments(node.target):
            continue
        wide = [
            n for n in node.all_input_nodes[1:] if getattr(n.meta.get("val"), "dtype", None) is torch.float32
        ]
        maker = context.flow.maker(wide[0]) if wide else None
        if wide:
            what = maker.id if maker else "a float32 tensor"
            cause = f"{what} is float32 and is rounded to {context.number_format.name} as it is written"
            advice = "write it out of place (x = x + y), which widens, if the precision is wanted"
            yield finding_at(context, site, "AMP305", cause, advice, confidence="rule")


CHECK = Check("AMP305", find)
