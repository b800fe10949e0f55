"""AMP117: the forward pass leaves a buffer infinite or NaN: a running statistic, an average, a cache."""

from __future__ import annotations

from ampaudit.audit.checks.interface import Cause, CheckContext
from ampaudit.run.record import Origin
from ampaudit.trace import Site

__all__ = ["CAUSE"]


def applies(context: CheckContext, site: Site, origin: Origin) -> str | None:
    """A buffer keeps the value: later calls and the checkpoint have it, even if no output shows it."""
    del context, site
    return None if origin.buffer is None else f"buffer {origin.buffer!r} keeps the value after the call"


CAUSE = Cause("AMP117", applies, "keep the buffer, and the op that writes it, in float32")
