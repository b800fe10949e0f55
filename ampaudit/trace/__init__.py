"""From a live module to an FX graph of ATen ops whose dtypes are those of the policy."""

from __future__ import annotations

from ampaudit.trace.graph import Role, Site, TracedModel
from ampaudit.trace.tracing import trace

__all__ = ["Role", "Site", "TracedModel", "trace"]
