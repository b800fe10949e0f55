"""AMP302: a dtype in the code that conflicts with the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.report.finding import Finding
from ampaudit.trace import Role, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name

__all__ = ["CHECK", "names_dtype"]

_WRITTEN = re.compile(r"\.(float|half|bfloat16)\(\)|torch\.(float16|bfloat16|float32|half|float)\b")


def names_dtype(site: Site) -> bool:
    """Return whether the code casts to a dtype that it names."""
    return site.role is Role.CAST and site.source is not None and bool(_WRITTEN.search(site.source.code))


def find(context: CheckContext) -> Iterator[Finding]:
    """Find casts in the code to the other 16-bit format, or to float32 where the policy undoes them."""
    for site in context.graph_sites:
        if not names_dtype(site):
            continue
        other = site.dtype in LOW_PRECISION_DTYPES and not context.low_precision(site)
        if other and site.decision.reason != "author":
            name = dtype_name(site.dtype)
            cause = f"the code asks for {name}, and this run is in {context.number_format.name}"
            yield finding_at(context, site, "AMP302", cause, "write x.to(y.dtype) of a tensor y beside it")
        elif site.dtype is torch.float32 and (undone := _undone(context, site)) is not None:
            cause = f"the code asks for float32, and the policy casts the value down again for {undone.id}"
            advice = "switch autocast off for that line: with torch.autocast(device, enabled=False)"
            yield finding_at(context, site, "AMP302", cause, advice)


def _undone(context: CheckContext, site: Site) -> Site | None:
    """Return the op for which the policy casts an upcast value down, if that is its only use."""
    node = context.flow.node(site)
    users = [context.flow.site(user) for user in node.users]
    if not users or not all(
        u and u.role is Role.INSERTED_CAST and u.dtype in LOW_PRECISION_DTYPES for u in users
    ):
        return None
    source = node.all_input_nodes[0].meta.get("val")
    if getattr(source, "dtype", None) not in LOW_PRECISION_DTYPES:
        return None
    return next(iter(context.flow.readers(site)), None)


CHECK = Check("AMP302", find)
