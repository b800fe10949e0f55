"""Finds the function of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampaudit.source.onnx.ops import elementwise, indexing, products, reductions, shapes  # noqa: F401
from ampaudit.source.onnx.ops.registry import OPERATORS, Operator
from ampaudit.source.onnx.values import Unsupported

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["function_for"]


def function_for(node: ir.Node) -> Operator:
    """Return the function that computes a node.

    Raises:
        Unsupported: there is none.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return OPERATORS[domain, node.op_type]
    except KeyError:
        raise Unsupported(f"no operator {node.op_type} of {domain or 'ai.onnx'}") from None
