"""Raises the version of an ONNX model's operators, where more of them then take a 16-bit format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampaudit.export.onnx.types import is_float32, node_types, on_last_axis, schema_of
from ampaudit.source.onnx.names import STANDARD

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["raise_opset"]

_NEWEST = 23
# by the version in which they changed their meaning, but not their attributes and inputs, or not only these
_CHANGED = {
    **{"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13},
    **{"RoiAlign": 16, "Resize": 11, "GridSample": 20, "GroupNormalization": 21},
}


def raise_opset(model: ir.Model, low: str) -> int | None:
    """Raise the version to the least at which as many nodes as possible take a format.

    Nodes keep all that they have; only attributes that became inputs are moved. A version at which a node
    would compute something else is not taken.

    Returns:
        The version, or ``None`` if it stays.
    """
    import onnx

    given = model.opset_imports.get("")
    if given is None:
        return None
    nodes = [n for n in model.graph.all_nodes() if n.domain in STANDARD and n.version is None]
    floats = [n for n in nodes if any(map(is_float32, (*n.inputs, *n.outputs)))]

    def taking(version: int) -> int:
        return sum(node_types(node, version, low).takes_low for node in floats)

    best, most = given, taking(given)
    for version in range(given + 1, min(_NEWEST, onnx.defs.onnx_opset_version()) + 1):
        if not all(_means_the_same(node, given, version) for node in nodes):
            break
        if taking(version) > most:
            best, most = version, taking(version)
    if best == given:
        return None
    taken = {str(v.name) for n in model.graph.all_nodes() for v in (*n.inputs, *n.outputs) if v is not None}
    for node in nodes:
        _move_attributes(node, given, best, taken)
    model.opset_imports[""] = best
    oldest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", best)], ignore_unknown=True)
    model.ir_version = max(model.ir_version, oldest)
    return best


def _means_the_same(node: ir.Node, given: int, version: int) -> bool:
    """Return whether a node of one version computes the same in another."""
    old, new = (schema_of("", node.op_type, number) for number in (given, version))
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
    moved = {name for name in node.attributes if name not in new.attributes}
    changed = any(_default(old, name) != _default(new, name) for name in defaults)
    kept = moved <= set(inputs[1][len(inputs[0]) :]) and len(moved) <= 1
    halves = node.op_type == "Split" and version >= 18 and len(node.inputs) < 2 and "split" not in moved
    return not (added or changed or halves) and kept


def _keeps_last_axis(node: ir.Node) -> bool:
    """Return whether a softmax says that it is over the last axis, where its versions agree."""
    return node.op_type.endswith(("Softmax", "Hardmax")) and "axis" in node.attributes and on_last_axis(node)


def _default(schema: Any, name: str) -> bytes:
    found: bytes = schema.attributes[name].default_value.SerializeToString()
    return found


def _move_attributes(node: ir.Node, given: int, version: int, taken: set[str]) -> None:
    """Turn the attribute that became an input into one, with a name that is not taken."""
    import numpy as np
    import onnx_ir as ir

    old, new = (schema_of("", node.op_type, number) for number in (given, version))
    for name in [name for name in node.attributes if name not in new.attributes]:
        numbers = np.array(node.attributes[name].as_ints(), np.int64)
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        label = f"{node.outputs[0].name}_{name}"
        while label in taken or label in graph.initializers:
            label += "_"
        taken.add(label)
        made = ir.Value(name=label, shape=ir.Shape(numbers.shape), type=ir.TensorType(ir.DataType.INT64))
        made.const_value = ir.tensor(numbers, name=label)
        graph.register_initializer(made)
        position = [formal.name for formal in new.inputs].index(name)
        node.resize_inputs(position + 1)
        node.replace_input_with(position, made)
        del node.attributes[name]
        assert position >= len(old.inputs)
