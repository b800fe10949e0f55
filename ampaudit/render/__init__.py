"""Renders documents in the formats of ``render.FORMAT_REGISTRY``."""

from __future__ import annotations
