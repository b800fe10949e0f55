"""Small models of failures that people reported in public, each with a healthy twin."""

from __future__ import annotations

from tests.support.models import attention, feed_forward, geometry, losses, norms, sums, weights
from tests.support.models.case import CASES, COMBINATIONS, Case

__all__ = [
    "CASES",
    "COMBINATIONS",
    "Case",
    "attention",
    "feed_forward",
    "geometry",
    "losses",
    "norms",
    "sums",
    "weights",
]
