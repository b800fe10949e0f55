"""Proves bounds: for each site, an interval that contains its values for all inputs of a domain."""

from __future__ import annotations

from ampaudit.bounds.analysis import Bound, BoundTable, bound
from ampaudit.bounds.interval import Interval

__all__ = ["Bound", "BoundTable", "Interval", "bound"]
