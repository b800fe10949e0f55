"""The operators of ONNX as functions of PyTorch."""

from __future__ import annotations

from ampaudit.source.onnx.ops import (  # noqa: F401
    control,
    elementwise,
    indexing,
    pooling,
    products,
    reductions,
)
from ampaudit.source.onnx.values import OPERATORS

__all__ = ["OPERATORS"]
