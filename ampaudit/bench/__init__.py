"""Measures what each mode of running or training a model costs, side by side, and predicts its memory."""

from __future__ import annotations
