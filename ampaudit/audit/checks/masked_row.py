"""AMP113: a softmax row that is completely masked and therefore NaN."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_SOFTMAX = ("softmax", "log_softmax", "scaled_dot_product_attention")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether -inf in the mask makes the softmax NaN, which takes a fully masked row."""
    if context.flow.base(site) in _SOFTMAX and context.observed(site.id).nan:
        return "a row of this softmax holds nothing but -inf"
    seen = context.observed(site.id)
    masks = site.id in context.parameter_free or site.id in context.record.by_design
    if not masks or not seen.neg_inf or seen.pos_inf:
        return None
    after = next((p for p in origin.poisons if context.flow.base(context.site[p]) in _SOFTMAX), None)
    return f"-inf masks a whole row, which is NaN at {after}" if after else None


CAUSE = Cause(
    "AMP113",
    applies,
    "fill with torch.finfo(scores.dtype).min, or leave one element of every row unmasked",
)
