"""Proves bounds: for each site, an interval that contains its values for all inputs of a domain."""

from __future__ import annotations

from ampaudit.bounds.analysis import bound
from ampaudit.bounds.interval import Interval
from ampaudit.bounds.table import Bound, BoundTable

__all__ = ["Bound", "BoundTable", "Interval", "bound"]
