"""Measures what each way to run or train a model costs, side by side, and predicts its memory."""

from __future__ import annotations
