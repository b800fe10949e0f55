"""AMP203: log(softmax(x)), where a small probability becomes 0 and its log -inf."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.audit.checks.latent import LOGARITHMS, latent_check
from ampaudit.core.text import format_number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE", "CHECK"]

_ADVICE = "write torch.log_softmax(x, dim)"


def applies(context: CheckContext, site: Site, origin: Origin | None) -> str | None:
    """Return whether the op is the log of a 16-bit softmax."""
    del origin
    flow = context.flow
    if flow.base(site) not in LOGARITHMS:
        return None
    softmax = flow.comes_from(flow.node(site).all_input_nodes[0], "softmax", within=2)
    if softmax is None or not any(context.low_precision(step) for step in (softmax, *flow.makers(site))):
        return None
    form = context.number_format
    return f"probabilities below {format_number(form.flush_below)} are 0 in {form.name}, and log(0) is -inf"


CAUSE = Cause("AMP203", applies, _ADVICE)
CHECK = latent_check("AMP203", applies, _ADVICE)
