"""Gradients of the mixed graph and of FP32, op by op on the way back, and what they say about scales."""

from __future__ import annotations

__all__: list[str] = []
