"""AMP107: exp, a power, or a handwritten sum of exponentials: exp overflows float16 beyond 11.09."""

from __future__ import annotations

import math

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "logaddexp")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op is an exponential, or adds exponentials up."""
    del origin
    limit = math.log(context.number_format.max)
    base = context.flow.base(site)
    exponent = context.flow.arguments(site).get("exponent")
    if base == "pow" and isinstance(exponent, int | float) and exponent < 0:
        return None  # infinite at 0, as a division is
    if base in _EXPONENTIALS:
        return f"{base} grows faster than any format; exp(x) overflows from x = {limit:.4g}"
    before = (context.flow.base(maker) for maker in context.flow.makers(site))
    if base in ("sum", "add", "mul", "cumsum") and any(name in _EXPONENTIALS for name in before):
        return f"these are exponentials written out; exp(x) overflows from x = {limit:.4g}"
    return None


CAUSE = Cause(
    "AMP107",
    applies,
    "use F.softplus, torch.logsumexp or F.softmax, which stay in range; or subtract the maximum first",
)
