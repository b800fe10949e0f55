"""AMP301: a constant, or a mask made of one, that overflows in 16 bits."""

from __future__ import annotations

import math

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.core.text import format_number
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]

_FILLS = ("masked_fill", "full", "full_like", "fill", "where", "new_full", "add", "sub", "scalar_tensor")


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether the call holds an out-of-range Python number, or its value is made of constants only."""
    del origin
    numbers = [v for v in context.flow.arguments(site).values() if isinstance(v, float | int)]
    numbers += [v for v in site.original_args.values() if isinstance(v, float | int)]
    large = [v for v in numbers if not isinstance(v, bool) and context.number_format.max < abs(v) < math.inf]
    if large and context.flow.base(site) in _FILLS:
        return f"the constant {format_number(large[0])} is in the call"
    return "the value is made of constants" if site.id in context.flow.constants else None


CAUSE = Cause(
    "AMP301",
    applies,
    "for a mask or a limit, write torch.finfo(x.dtype).min (or .max) of the tensor that it is used with; "
    "compute with any other constant in float32",
)
