"""Runs nodes without a function here as one op each, through ONNX Runtime."""

from __future__ import annotations

from ampaudit.source.onnx.values import NodeCall, Value

__all__ = ["opaque_results"]


def opaque_results(call: NodeCall) -> list[Value]:
    """Compute a node."""
    raise call.fault(f"no operator {call.node.op_type} of {call.node.domain or 'ai.onnx'}")
