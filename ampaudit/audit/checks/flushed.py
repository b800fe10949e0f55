"""AMP201: a value that is flushed to zero before a division or logarithm."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.core.text import format_number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_AT_ZERO = ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "pow", "logit", "remainder", "fmod")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the op is infinite at zero."""
    del origin
    if context.flow.base(site) not in _AT_ZERO:
        return None
    form = context.number_format
    least = format_number(form.flush_below)
    return f"an input that is not zero in FP32 is flushed to 0: {form.name} holds nothing below {least}"


CAUSE = Cause(
    "AMP201",
    applies,
    "scale the value up before it is rounded, add an eps that the format holds, or use float32",
)
