"""Finds what keeps 16 bits from speeding a model up: sizes, casts, and float32 beside 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.ops import having
from ampaudit.core.text import listed
from ampaudit.findings.finding import Finding
from ampaudit.trace import Role, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES, UNKNOWN_SIZE, node_dtype

_COSTLY = having("product", "added_product", "weighted") | {"scaled_dot_product_attention"}
MIN_SITES = 4
MULTIPLE = 8  # elements: 16 bytes of a 16-bit format, NVIDIA's "Matrix Multiplication Background" guide
SMALL = 16  # sizes up to this one are not worth padding
_ALIGNED = ("linear", "addmm", "mm", "conv1d", "conv2d", "conv3d")


def find_alignment(context: CheckContext) -> Iterator[Finding]:
    """Find 16-bit products with a weight whose inner or outer size is no multiple of eight."""
    for site in context.low_precision_sites:
        if context.flow.base(site) not in _ALIGNED:
            continue
        arguments = context.flow.arguments(site)
        weight = arguments.get("weight", arguments.get("mat2"))
        value = getattr(weight, "meta", {}).get("val")
        if value is None or value.ndim < 2 or arguments.get("groups", 1) != 1:
            continue
        sizes = zip(("out", "in"), map(int, value.shape[:2]), strict=True)
        odd = [f"{name} = {size}" for name, size in sizes if size % MULTIPLE and size > SMALL]
        if odd:
            what = f"{', '.join(odd)}: not a multiple of {MULTIPLE}"
            cause = f"{what}, so tensor cores run padded or not at all"
            advice = f"pad to a multiple of {MULTIPLE}"
            yield finding_at(context, site, "AMP501", cause, advice, confidence="rule")


def find_ping_pong(context: CheckContext) -> Iterator[Finding]:
    """Find casts of casts, with only views between them, that end in the original dtype."""
    for site in context.graph_sites:
        if not site.role.converts or site.role is Role.WEIGHT_CAST:
            continue
        before = context.flow.node(site).all_input_nodes[0]
        while (first := context.flow.site(before)) is not None and first.role is Role.VIEW:
            before = before.all_input_nodes[0]
        if first is None or not first.role.converts or first.role is Role.WEIGHT_CAST:
            continue
        source = context.flow.node(first).all_input_nodes[0].meta.get("val")
        if getattr(source, "dtype", None) == site.dtype != first.dtype:
            cause = (
                f"{first.id} casts this value, and it is cast back here: two passes over memory for nothing"
            )
            loss = " and its precision is gone" if context.low_precision(first) else ""
            advice = "give both users the same precision, so that one cast is left"
            yield finding_at(context, site, "AMP502", f"{cause}{loss}", advice, confidence="rule")


def find_costly_island(context: CheckContext) -> Iterator[Finding]:
    """Find 16-bit ops, except products, between float32 ops."""
    for site in context.low_precision_sites:
        base = context.flow.base(site)
        if site.role is not Role.COMPUTE or base in _COSTLY:
            continue
        node = context.flow.node(site)
        floats = (n for n in node.all_input_nodes if getattr(n.meta.get("val"), "is_floating_point", bool)())
        around = [context.flow.site(n) for n in (*floats, *node.users)]
        casts = [s for s in around if s is not None and s.role is Role.INSERTED_CAST]
        directions = {s.dtype in LOW_PRECISION_DTYPES for s in casts}
        if len(casts) != len(around) or len(directions) < 2 or any(UNKNOWN_SIZE in s.shape for s in casts):
            continue
        count = sum(math.prod(s.shape) for s in casts)
        cause = f"its casts from and to float32 move {count * (4 + 2):,} bytes to save the op {count * 2:,}"
        yield finding_at(context, site, "AMP503", cause, "leave this op in float32", confidence="rule")


def find_float32_spread(context: CheckContext) -> Iterator[Finding]:
    """Find ops promoted by a float32 operand that no rule asks for, and the float32 ops after them."""
    behind: dict[str, str] = {}
    spread: dict[str, list[Site]] = {}
    for site in context.graph_sites:
        if site.dtype is not torch.float32 or site.decision.explicit or site.role is not Role.COMPUTE:
            continue
        start = next((behind[m.id] for m in context.flow.producers(site) if m.id in behind), None)
        start = start or (site.id if _promotes(context, site) else None)
        if start is not None:
            behind[site.id] = start
            spread.setdefault(start, []).append(site)
    for sites in spread.values():
        if len(sites) >= MIN_SITES:
            others = listed([site.id for site in sites[1:]])
            cause = f"type promotion makes this op and {len(sites) - 1} after it float32: {others}"
            advice = "cast the float32 operand down here, if 16 bits are intended"
            yield finding_at(context, sites[0], "AMP504", cause, advice, confidence="rule")


def _promotes(context: CheckContext, site: Site) -> bool:
    dtypes = {node_dtype(n) for n in context.flow.node(site).all_input_nodes}
    return torch.float32 in dtypes and bool(dtypes & set(LOW_PRECISION_DTYPES))


CHECKS = (
    Check("AMP501", find_alignment),
    Check("AMP502", find_ping_pong),
    Check("AMP503", find_costly_island),
    Check("AMP504", find_float32_spread),
)
