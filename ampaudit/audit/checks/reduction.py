"""AMP105: a sum, product or running sum whose total leaves the range."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_REDUCTIONS = frozenset(
    """
    sum nansum mean cumsum prod cumprod sum_to_size index_add
    scatter_add segment_reduce trace logcumsumexp
    """.split()
)
_FACTORS = ("prod", "cumprod")
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
LONG = 64


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op reduces an axis; products of two activations count if the axis is long."""
    del origin
    flow, depth = context.flow, site.facts.depth if site.facts is not None else None
    terms = f" of {depth} terms" if depth else ""
    if flow.base(site) in _FACTORS:
        return f"the product of {depth or 'the'} factors is too large, not its factors"
    if flow.base(site) in _REDUCTIONS:
        return f"the total{terms} is too large, not its terms"
    activations = not any(flow.is_weight(node) for node in flow.node(site).all_input_nodes)
    if flow.base(site) in _PRODUCTS and activations and depth is not None and depth >= LONG:
        return f"the op adds up products of two activations: {depth} terms"
    return None


CAUSE = Cause(
    "AMP105",
    applies,
    "compute it in float32 (x.sum(dtype=torch.float32)), take the mean, or scale the terms first",
)
