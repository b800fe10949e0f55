"""AMP307: an op whose kernel rejects the mix of dtypes that it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.sites import SiteId
from ampaudit.policy.schema import Cast
from ampaudit.report.finding import Finding
from ampaudit.trace import Site
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CHECK", "refused_sites"]

_ADVICE = "make the dtypes agree: cast the other operand with .to(x.dtype)"
# what kernels say about their arguments' dtypes
_COMPLAINT = re.compile(
    r"dtype|scalar type|same type|data type|tensor type|should be the same", re.IGNORECASE
)
_LARGEST = 1 << 20  # elements of an argument that is made to try a kernel


def find(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose op raises about dtypes when called natively on zeros of the same dtypes and shapes."""
    if not _mixed_by_policy(context):
        for site, said in _refused(context):
            yield _finding(context, site, said)


def refused_sites(context: CheckContext) -> frozenset[SiteId]:
    """Return all sites whose kernel rejects their dtypes, whatever mixed them."""
    return frozenset(site.id for site, _ in _refused(context))


def _refused(context: CheckContext) -> Iterator[tuple[Site, str]]:
    """Yield such sites with torch's message."""
    tried: dict[tuple[object, ...], str | None] = {}
    for site in context.graph_sites:
        node = context.flow.node(site)
        dtypes = _mixed(node)
        if dtypes is None or not isinstance(node.target, OpOverload):
            continue
        key = (node.target, *dtypes)
        if key not in tried:
            tried[key] = _complaint(node, node.target)
        said = tried[key]
        if said is not None:
            yield site, said


def _mixed_by_policy(context: CheckContext) -> bool:
    """Return whether the policy itself mixes dtypes: float32 ops or weights beside 16-bit weights.

    That is not what the model's code does; a converter, or a library, casts there.
    """
    places = context.flow.traced.placeholders
    stored = {place.dtype for place in places if place.slot is Slot.PARAMETER}
    kept = any(site.decision.cast is Cast.FLOAT32 and site.decision.explicit for site in context.graph_sites)
    return not stored.isdisjoint(LOW_PRECISION_DTYPES) and (kept or torch.float32 in stored)


def _finding(context: CheckContext, site: Site, said: str) -> Finding:
    cause = f"torch rejects these dtypes: {said}; the audit continued as if they were promoted"
    return finding_at(context, site, "AMP307", cause, _ADVICE, confidence="rule")


def _mixed(node: fx.Node) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes of a node's floating-point arguments, if they differ and one is 16-bit."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return None
    values = [
        value for source in node.all_input_nodes if isinstance(value := source.meta.get("val"), torch.Tensor)
    ]
    floats = tuple(value.dtype for value in values if value.is_floating_point())
    return floats if len(set(floats)) > 1 and any(dtype in LOW_PRECISION_DTYPES for dtype in floats) else None


def _complaint(node: fx.Node, op: OpOverload) -> str | None:
    """Return torch's message about the dtypes; ``None`` if it accepts them or they cannot be tried."""
    try:
        given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
        args, kwargs = pytree.tree_map_only(torch.Tensor, _zeros, given)
        with torch.no_grad():
            op(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return text if _COMPLAINT.search(text) and "not implemented for" not in text else None
    except Exception:
        return None
    return None


def _zeros(value: Any) -> torch.Tensor:
    if value.numel() > _LARGEST:
        raise OverflowError("too large to try")
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


CHECK = Check("AMP307", find)
