"""Proofs: for each site, an interval that no input of the stated domain can leave."""

from __future__ import annotations

from ampaudit.bounds.analysis import SpanTable, bound
from ampaudit.bounds.span import Span

__all__ = ["Span", "SpanTable", "bound"]
