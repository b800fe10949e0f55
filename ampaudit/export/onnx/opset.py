"""Raises the operator set version of an ONNX model if more operators then support a 16-bit format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampaudit.export.onnx.types import is_float32, node_types, on_last_axis, schema_of
from ampaudit.source.onnx.names import STANDARD

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["raise_opset"]

_NEWEST = 23
# version in which each operator changed its semantics other than by its attributes and inputs
_CHANGED = {
    **{"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13},
    **{"RoiAlign": 16, "Resize": 11, "GridSample": 20, "GroupNormalization": 21},
}


def raise_opset(model: ir.Model, low: str) -> int | None:
    """Raise the version to the lowest at which as many nodes as possible support a format.

    Nodes stay unchanged, except that attributes that became inputs are moved. Versions at which a node would
    compute something else are skipped.

    Returns:
        The new version, or ``None`` if it does not change.
    """
    import onnx

    version_before = model.opset_imports.get("")
    if version_before is None:
        return None
    nodes = [n for n in model.graph.all_nodes() if n.domain in STANDARD and n.version is None]
    floats = [n for n in nodes if any(map(is_float32, (*n.inputs, *n.outputs)))]

    def taking(version: int) -> int:
        return sum(node_types(node, version, low).takes_low for node in floats)

    best, most = version_before, taking(version_before)
    for version in range(version_before + 1, min(_NEWEST, onnx.defs.onnx_opset_version()) + 1):
        if not all(_means_the_same(node, version_before, version) for node in nodes):
            break
        if taking(version) > most:
            best, most = version, taking(version)
    if best == version_before:
        return None
    names = {str(v.name) for n in model.graph.all_nodes() for v in (*n.inputs, *n.outputs) if v is not None}
    for node in nodes:
        _move_attributes(node, version_before, best, names)
    model.opset_imports[""] = best
    oldest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", best)], ignore_unknown=True)
    model.ir_version = max(model.ir_version, oldest)
    return best


def _means_the_same(node: ir.Node, version_before: int, version: int) -> bool:
    """Return whether a node of one version computes the same in another."""
    old, new = (schema_of("", node.op_type, number) for number in (version_before, version))
    if old is None or new is None or new.deprecated:
        return False
    if old.since_version == new.since_version:
        return True
    if old.since_version < _CHANGED.get(node.op_type, 0) <= new.since_version and not _keeps_last_axis(node):
        return False
    inputs = [[formal.name for formal in schema.inputs] for schema in (old, new)]
    outputs = [[formal.name for formal in schema.outputs] for schema in (old, new)]
    if inputs[1][: len(inputs[0])] != inputs[0] or (len(node.outputs) > 1 and outputs[0] != outputs[1]):
        return False
    added = [name for name, a in new.attributes.items() if name not in old.attributes and a.required]
    defaults = [n for n, a in old.attributes.items() if n in new.attributes and n not in node.attributes]
    removed = {name for name in node.attributes if name not in new.attributes}
    changed = any(_default(old, name) != _default(new, name) for name in defaults)
    movable = removed <= set(inputs[1][len(inputs[0]) :]) and len(removed) <= 1
    halves = node.op_type == "Split" and version >= 18 and len(node.inputs) < 2 and "split" not in removed
    return not (added or changed or halves) and movable


def _keeps_last_axis(node: ir.Node) -> bool:
    """Return whether a softmax explicitly uses the last axis, on which its versions agree."""
    return node.op_type.endswith(("Softmax", "Hardmax")) and "axis" in node.attributes and on_last_axis(node)


def _default(schema: Any, name: str) -> bytes:
    default: bytes = schema.attributes[name].default_value.SerializeToString()
    return default


def _move_attributes(node: ir.Node, version_before: int, version: int, names: set[str]) -> None:
    """Turn the attribute that became an input into an initializer with a new name."""
    import numpy as np
    import onnx_ir as ir

    old, new = (schema_of("", node.op_type, number) for number in (version_before, version))
    for name in [name for name in node.attributes if name not in new.attributes]:
        numbers = np.array(node.attributes[name].as_ints(), np.int64)
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        label = f"{node.outputs[0].name}_{name}"
        while label in names or label in graph.initializers:
            label += "_"
        names.add(label)
        constant = ir.Value(name=label, shape=ir.Shape(numbers.shape), type=ir.TensorType(ir.DataType.INT64))
        constant.const_value = ir.tensor(numbers, name=label)
        graph.register_initializer(constant)
        position = [formal.name for formal in new.inputs].index(name)
        node.resize_inputs(position + 1)
        node.replace_input_with(position, constant)
        del node.attributes[name]
        assert position >= len(old.inputs)
