"""Trains in 16 bits: prepared models, loss scalers, and the health of a run."""

from __future__ import annotations

__all__: list[str] = []
