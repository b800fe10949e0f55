"""AMP108: attention scores that overflow before they are scaled."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_SOFTMAX = ("softmax", "_softmax", "log_softmax", "exp")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the site is a product of two activations followed by a softmax."""
    del origin
    flow = context.flow
    if flow.base(site) not in _PRODUCTS or any(flow.is_weight(n) for n in flow.node(site).all_input_nodes):
        return None
    softmax = flow.leads_to(site, *_SOFTMAX, within=6)
    if softmax is None:
        return None
    scaled = flow.leads_to(site, "div", "mul", within=2)
    return (
        f"these scores are scaled only afterwards, at {scaled.id}"
        if scaled
        else f"these scores go unscaled into {softmax.id}"
    )


CAUSE = Cause(
    "AMP108", applies, "scale q before the product (q * d**-0.5) @ k^T, or use scaled_dot_product_attention"
)
