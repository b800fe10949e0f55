"""Finds the function that the ONNX standard gives for an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.source.onnx.values import Known, NodeCall, Operand

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["onnx_type_of", "refers", "standard_body", "with_values"]


def refers(node: ir.Node) -> bool:
    """Return whether a constant's value is an attribute of the function that it is in."""
    return any(attribute.is_ref() for attribute in node.attributes.values())


def with_values(call: NodeCall) -> ir.Node:
    """Return a copy of a node whose attributes have the values that the calling function gives them."""
    import onnx_ir as ir

    node = call.node
    attributes = []
    for name, attribute in node.attributes.items():
        found: Any = call.attributes.get(str(attribute.ref_attr_name)) if attribute.is_ref() else attribute
        if found is not None:
            attributes.append(ir.Attr(name, found.type, found.value))
    inputs = [None if v is None else ir.Value(name=f"i{i}") for i, v in enumerate(call.inputs)]
    outputs = [ir.Value(name=f"o{i}" if output.name else "") for i, output in enumerate(node.outputs)]
    return ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=node.name)


def standard_body(call: NodeCall) -> ir.Function | None:
    """Return the body that the standard gives for a node with its attributes and types of inputs.

    ``None`` if the standard has none.
    """
    import onnx
    import onnx_ir as ir

    try:
        schema: Any = onnx.defs.get_schema(call.node.op_type, call.version, call.node.domain)
    except onnx.defs.SchemaError:
        return None
    proto = onnx.FunctionProto()
    if schema.has_function:
        versions = [version for version in schema.function_opset_versions if version <= call.version]
        data = schema.get_function_with_opset_version(max(versions, default=schema.since_version))
    elif schema.has_context_dependent_function:
        node = ir.serde.serialize_node(with_values(call)).SerializeToString()
        known = schema.context_dependent_function_opset_versions
        version = max((v for v in known if v <= call.version), default=schema.since_version)
        types = [onnx_type_of(value).SerializeToString() for value in call.inputs]
        data = schema.get_context_dependent_function_with_opset_version(version, node, types)
    else:
        return None
    if not data:
        return None
    proto.ParseFromString(data)
    made = {name for node in proto.node for name in node.output} | set(proto.input)
    for name in set(proto.output) - made:  # left out of this body, since nothing reads it
        proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
    function = ir.serde.deserialize_function(proto)
    for name in schema.attributes:
        default = schema.attributes[name].default_value
        if default.name and name not in call.node.attributes:
            function.attributes[name] = ir.serde.deserialize_attribute(default)
    return function


def onnx_type_of(value: Operand) -> Any:
    """Return the ONNX type of a value."""
    import onnx
    import onnx_ir as ir

    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        return onnx.helper.make_sequence_type_proto(onnx_type_of(value[0]) if value else onnx.TypeProto())
    tensor = value.real if isinstance(value, Known) else value
    assert isinstance(tensor, torch.Tensor)
    kind = next(kind for kind in ir.DataType if torch_dtype_of(kind) == tensor.dtype)
    return onnx.helper.make_tensor_type_proto(kind.value, list(tensor.shape))
