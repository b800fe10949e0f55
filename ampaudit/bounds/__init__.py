"""Proofs: for each site, an interval that no input of the stated domain can leave."""

from __future__ import annotations

from ampaudit.bounds.analysis import bound
from ampaudit.bounds.span import Span
from ampaudit.bounds.table import Bound, SpanTable

__all__ = ["Bound", "Span", "SpanTable", "bound"]
