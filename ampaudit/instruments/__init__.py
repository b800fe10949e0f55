"""Instruments watch a run besides the usual measurements; each is one package."""

from __future__ import annotations

__all__ = ["NAMES"]

NAMES = ("against", "backward", "sensitivity")
