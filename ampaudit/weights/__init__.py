"""Stored weights: in which dtype each is kept, and how they are rounded and written. Knows no graph."""

from __future__ import annotations

from ampaudit.weights.rounding import clipped
from ampaudit.weights.storage import Choice, Mode, choose_by_name, choose_planned
from ampaudit.weights.stream import Look, StoredTensor, WeightFiles, write_weights

__all__ = [
    "Choice",
    "Look",
    "Mode",
    "StoredTensor",
    "WeightFiles",
    "choose_by_name",
    "choose_planned",
    "clipped",
    "write_weights",
]
