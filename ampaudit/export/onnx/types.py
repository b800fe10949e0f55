"""Derives the types that a node's inputs and outputs may have from the schemas of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import onnx_ir as ir
import torch

from ampaudit.source.onnx.checks import schema_of

# operators whose results hold elements of their inputs
MOVING = frozenset(
    """
    CenterCropPad Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity If Pad
    Reshape ReverseSequence Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Where
    """.split()
)
CHOOSING = frozenset("ArgMax ArgMin NonMaxSuppression TopK".split())
# operators that read tensors of any type
TYPELESS = frozenset("Cast IsInf IsNaN NonZero Shape Size".split())
COMPARING = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())


TensorOf = Callable[[ir.TensorProtocol], torch.Tensor]  # reads a stored tensor


class SlotType(Enum):
    """The type of an input or output that is float32 in the original."""

    FLOAT32 = "float32"  # always float32
    CHOSEN = "chosen"  # the type that is chosen for the node
    ANY = "any"  # the type of the value, without a cast


@dataclass(frozen=True, slots=True)
class NodeTypes:
    """The types of a node's inputs and outputs, and whether it supports the 16-bit format at all."""

    inputs: tuple[SlotType, ...]
    outputs: tuple[SlotType, ...]
    takes_low: bool


def is_float32(value: ir.Value | None) -> bool:
    """Return whether a value is a tensor of float32."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


def _is_container(value: ir.Value | None) -> bool:
    """Return whether a value is a sequence or optional, whose elements keep their type."""
    return value is not None and value.type is not None and not isinstance(value.type, ir.TensorType)


def constant_of(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node, or its floats as one; ``None`` for other attributes."""
    for name, attribute in node.attributes.items():
        if name == "value":
            tensor: ir.TensorProtocol = attribute.value
            return tensor
        if name in ("value_float", "value_floats"):
            return ir.tensor(attribute.value, dtype=ir.DataType.FLOAT)
    return None


def node_types(node: ir.Node, version: int, low: str) -> NodeTypes:
    """Return the types of a node's inputs and outputs in a version of its operator set.

    The 16-bit format ``low`` is ``float16`` or ``bfloat16``.
    """
    schema = schema_of(node.domain, node.op_type, version)
    if schema is None:  # a runtime's operator, assumed to have one type for all, as its fused operators do
        return _alike(node, SlotType.CHOSEN, takes_low=node.domain == "com.microsoft")
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    wide = _alike(node, SlotType.FLOAT32, takes_low=False)
    special = _special(node)
    if special is not None:  # in an old operator set, not even Cast supports the format
        return special if any(f"tensor({low})" in allowed for allowed in kinds.values()) else wide
    if any(map(_is_container, (*node.inputs, *node.outputs))):
        return wide

    def slot(formal: Any) -> SlotType:
        allowed = kinds.get(formal.type_str, {formal.type_str})
        return SlotType.CHOSEN if f"tensor({low})" in allowed else SlotType.FLOAT32

    inputs = tuple(slot(_formal(schema.inputs, index)) for index in range(len(node.inputs)))
    outputs = tuple(slot(_formal(schema.outputs, index)) for index in range(len(node.outputs)))
    if node.op_type == "LayerNormalization" and not node.domain:
        outputs = (outputs[0], *(SlotType.FLOAT32,) * (len(outputs) - 1))  # its statistics are of stash_type
    if node.op_type == "Resize" and not node.domain and version > 10:
        # its region, scales and sizes are coordinates, which 16 bits would move
        inputs = (inputs[0], *(SlotType.FLOAT32,) * (len(inputs) - 1))
    main = [s for s, value in zip(inputs, node.inputs, strict=True) if is_float32(value)]
    main += [s for s, value in zip(outputs, node.outputs, strict=True) if is_float32(value)]
    return NodeTypes(inputs, outputs, SlotType.CHOSEN in main)


def _alike(node: ir.Node, slot: SlotType, *, takes_low: bool) -> NodeTypes:
    return NodeTypes((slot,) * len(node.inputs), (slot,) * len(node.outputs), takes_low)


def _special(node: ir.Node) -> NodeTypes | None:
    """Return the types of operators whose schema does not tell them; ``None`` for other operators.

    These have bodies, convert types, or accept any type.
    """
    if node.domain:
        return None
    if node.op_type in ("If", "Loop", "Scan"):
        return _alike(node, SlotType.CHOSEN, takes_low=True)
    if node.op_type == "CastLike":  # its result has the type of its second input
        return NodeTypes((SlotType.ANY, SlotType.CHOSEN), (SlotType.CHOSEN,), True)
    if node.op_type in TYPELESS:
        return NodeTypes((SlotType.ANY,), (SlotType.CHOSEN,), True)
    return None


def on_last_axis(node: ir.Node) -> bool:
    """Return whether a node works along the last axis, its operator's default."""
    axis, data = node.attributes.get_int("axis", -1), node.inputs[0]
    return axis == -1 or (data is not None and data.shape is not None and axis == len(data.shape) - 1)


def nonstandard_operators(model: ir.Model) -> set[str]:
    """Return operators in the standard domain that the standard does not define, such as ONNX Runtime's."""
    version = model.opset_imports.get("", 1)
    operators = {node.op_type for node in model.graph.all_nodes() if not node.domain}
    return {operator for operator in operators if schema_of("", operator, version) is None}


def _formal(formals: Any, index: int) -> Any:
    """Return the schema's parameter for an argument; the last parameter may be variadic."""
    return formals[min(index, len(formals) - 1)]
