"""AMP117: the forward pass writes inf or NaN to a buffer, such as a running statistic or a cache."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """Return whether a buffer keeps the value, which later calls and the checkpoint will see."""
    del context, site
    return None if origin.buffer is None else f"buffer {origin.buffer!r} keeps the value after the call"


CAUSE = Cause("AMP117", applies, "keep the buffer, and the op that writes it, in float32")
