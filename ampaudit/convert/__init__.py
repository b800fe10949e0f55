"""The converted model: casts in the graph, 16-bit working weights, FP32 masters."""

from __future__ import annotations

from ampaudit.convert.model import ConvertedModel, Release, WeightCopy, convert, identity

__all__ = ["ConvertedModel", "Release", "WeightCopy", "convert", "identity"]
