"""Checkpoints as streams of bytes: read tensor by tensor, in pieces, and written the same way."""

from __future__ import annotations
