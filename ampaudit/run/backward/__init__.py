"""Computes gradients of the mixed graph and of FP32, op by op, and the loss scales that suit them."""

from __future__ import annotations

__all__: list[str] = []
