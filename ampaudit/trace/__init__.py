"""Traces a live module into an FX graph of ATen ops with the policy's dtypes."""

from __future__ import annotations

from ampaudit.trace.capture import TraceConfig
from ampaudit.trace.graph import Role, Site, TracedModel
from ampaudit.trace.tracing import trace

__all__ = ["Role", "Site", "TraceConfig", "TracedModel", "trace"]
