"""AMP204: log(1 - sigmoid(x)) or log(sigmoid(x)), where a saturated sigmoid gives -inf."""

from __future__ import annotations

from torch import fx

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.audit.checks.latent import LOGARITHMS, latent_check
from ampaudit.core.text import format_number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE", "CHECK"]

LARGEST_EPS = 0.01
_ADVICE = "write F.logsigmoid(-x) for log(1 - sigmoid(x)), F.logsigmoid(x) for log(sigmoid(x))"


def applies(context: CheckContext, site: Site, origin: Origin | None) -> str | None:
    """Return whether the op is the log of a sigmoid, or of one minus it, partly in 16 bits."""
    del origin
    flow = context.flow
    if flow.base(site) not in LOGARITHMS:
        return None
    steps = _steps(context, flow.node(site).all_input_nodes[0])
    if steps is None or not any(context.low_precision(step) for step in steps):
        return None
    bits = context.number_format.fraction_bits
    edge = (bits + 1 + 1) * 0.6931
    return f"1 - sigmoid(x) rounds to 0 in {context.number_format.name} from x = {format_number(edge)} on"


def _steps(context: CheckContext, node: fx.Node) -> list[Site] | None:
    """Return a sigmoid and what follows (``1 - p``, ``-p``, a lower limit, a small eps), or ``None``."""
    flow, steps = context.flow, list[Site]()
    for _ in range(4):
        site = flow.maker(node)
        if site is None:
            return None
        steps.append(site)
        if flow.base(site) == "sigmoid":
            return steps
        if flow.base(site) not in ("sub", "rsub", "neg", "add", "clamp", "clamp_min"):
            return None
        numbers = [v for v in flow.arguments(site).values() if isinstance(v, int | float)]
        if any(abs(v) > LARGEST_EPS and v not in (1, -1) for v in numbers):
            return None
        tensors = [n for n in flow.node(site).all_input_nodes if flow.comes_from(n, "sigmoid", within=3)]
        if len(tensors) != 1:
            return None
        node = tensors[0]
    return None


CAUSE = Cause("AMP204", applies, _ADVICE)
CHECK = latent_check("AMP204", applies, _ADVICE)
