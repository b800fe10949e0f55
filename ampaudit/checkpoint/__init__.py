"""Reads and writes checkpoints as streams, tensor by tensor and in pieces."""

from __future__ import annotations
