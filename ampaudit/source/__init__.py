"""Loads models: from a Python file, an import path, a Hugging Face directory or a .pt2 archive."""

from __future__ import annotations

from ampaudit.source.interface import Batch, ModelSource

__all__ = ["Batch", "ModelSource"]
