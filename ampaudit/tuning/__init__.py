"""Finds the fewest ops that must stay in float32 for an accuracy."""

from __future__ import annotations

__all__: list[str] = []
