"""AMP303: float64 in the graph, which no policy casts and every accelerator computes slowly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Role

__all__ = ["CHECK"]


def find(context: CheckContext) -> Iterator[Finding]:
    """Find the first float64 op of each layer that depends on the model's weights or input."""
    reported: set[str] = set()
    for site in context.graph_sites:
        if site.dtype is not torch.float64 or site.role is not Role.COMPUTE or site.layer in reported:
            continue
        if site.id not in context.flow.constants and site.shape:
            reported.add(site.layer)
            cause = "this op computes in float64, which no cast of the policy touches"
            advice = "look for a Python or NumPy number that became a float64 tensor; give it dtype=x.dtype"
            yield finding_at(context, site, "AMP303", cause, advice, confidence="rule")


CHECK = Check("AMP303", find)
