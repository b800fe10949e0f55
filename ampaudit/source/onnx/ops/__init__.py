"""The operators of ONNX as functions of PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.source.onnx.names import plain_domain
from ampaudit.source.onnx.ops import (  # noqa: F401
    control,
    elementwise,
    indexing,
    pooling,
    products,
    reductions,
)
from ampaudit.source.onnx.values import OPERATORS, Operator

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["function_for", "function_for_name"]


def function_for(node: ir.Node) -> Operator | None:
    """Return the function that computes a node; ``None`` if there is none."""
    return function_for_name(plain_domain(node.domain), node.op_type)


def function_for_name(domain: str, name: str) -> Operator | None:
    """Return the function that computes an operator; ``None`` if there is none."""
    return OPERATORS.get((domain, name))
