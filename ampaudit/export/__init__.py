"""Writes and verifies converted checkpoints: weights, program and manifest."""

from __future__ import annotations
