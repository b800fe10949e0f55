"""AMP503: a small op whose casts move more bytes than its narrower format saves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Role, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES, UNKNOWN_SIZE

__all__ = ["CHECK"]

_PRODUCTS = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")


def find(context: CheckContext) -> Iterator[Finding]:
    """Find 16-bit ops, except products, between float32 ops."""
    for site in context.low_precision_sites:
        base = context.flow.base(site)
        if site.role is not Role.COMPUTE or base in _PRODUCTS or base.startswith("conv"):
            continue
        casts = _casts(context, site)
        if casts is None:
            continue
        moved = sum(count * (4 + 2) for count in casts)
        saved = sum(count * 2 for count in casts)
        cause = f"its casts from and to float32 move {moved:,} bytes to save the op {saved:,}"
        yield finding_at(context, site, "AMP503", cause, "leave this op in float32", confidence="rule")


def _casts(context: CheckContext, site: Site) -> list[int] | None:
    """Count the elements cast around an op, if all of its inputs and results are cast."""
    node = context.flow.node(site)
    around = [context.flow.site(n) for n in (*_tensors(node), *node.users)]
    ours = [s for s in around if s is not None and s.role is Role.INSERTED_CAST]
    down = [s for s in ours if s.dtype in LOW_PRECISION_DTYPES]
    if not around or len(ours) != len(around) or not down or len(down) == len(ours):
        return None
    if any(UNKNOWN_SIZE in s.shape for s in ours):
        return None
    return [math.prod(s.shape) for s in ours]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if getattr(n.meta.get("val"), "is_floating_point", bool)()]


CHECK = Check("AMP503", find)
