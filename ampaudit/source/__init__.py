"""Loads models from Python files, import paths, Hugging Face directories, .pt2 archives and ONNX files."""

from __future__ import annotations

from ampaudit.source.interface import Batch, ModelSource

__all__ = ["Batch", "ModelSource"]
