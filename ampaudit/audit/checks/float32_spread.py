"""AMP504: one float32 value that promotes a long stretch of the model to float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at, some_sites
from ampaudit.report.finding import Finding
from ampaudit.trace import Role, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CHECK"]

MIN_SITES = 4


def find(context: CheckContext) -> Iterator[Finding]:
    """Find ops promoted by a float32 operand that no rule asks for, and the float32 ops after them."""
    behind: dict[str, str] = {}
    spread: dict[str, list[Site]] = {}
    for site in context.graph_sites:
        if site.dtype is not torch.float32 or site.decision.explicit or site.role is not Role.COMPUTE:
            continue
        start = next((behind[m.id] for m in context.flow.makers(site) if m.id in behind), None)
        start = start or (site.id if _promotes(context, site) else None)
        if start is not None:
            behind[site.id] = start
            spread.setdefault(start, []).append(site)
    for sites in spread.values():
        if len(sites) >= MIN_SITES:
            cause = (
                f"type promotion makes this op and {len(sites) - 1} after it float32: {some_sites(sites[1:])}"
            )
            advice = "cast the float32 operand down here, if 16 bits are intended"
            yield finding_at(context, context.site[sites[0].id], "AMP504", cause, advice, confidence="rule")


def _promotes(context: CheckContext, site: Site) -> bool:
    dtypes = {getattr(n.meta.get("val"), "dtype", None) for n in context.flow.node(site).all_input_nodes}
    return torch.float32 in dtypes and bool(dtypes & set(LOW_PRECISION_DTYPES))


CHECK = Check("AMP504", find)
