"""Small models, and a judge of its own of which of their ops must stay in float32."""

from __future__ import annotations

from tests.support.tuning import misleading  # registers its models
from tests.support.tuning.graphs import GRAPHS, SmallGraph
from tests.support.tuning.oracle import MOVES, FewestOps, PlainGraph, sqnr

__all__ = ["GRAPHS", "MOVES", "FewestOps", "PlainGraph", "SmallGraph", "misleading", "sqnr"]
