"""Measures the cost of each mode of running or training a model, side by side, and predicts its memory."""

from __future__ import annotations
