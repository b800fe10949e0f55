"""Validates the graph of an ONNX file before any of it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import onnx

from ampaudit.core.untrusted import describe

MAX_NODES = 200_000  # including the nodes of functions for each call
_MAX_NAME = 10_000  # characters; names of fused nodes are long
_MAX_CALLS = 50  # nested calls of functions
_UPGRADE = "pip install --upgrade onnx onnx-ir, or export it for an older operator set"
_NUMBER = re.compile(r"[0-9]{1,18}")
_Function = tuple[str, str, str]


class BadGraph(Exception):
    """Raised for an invalid graph, with a hint for the user."""

    def __init__(self, what: str, hint: str = "export it again") -> None:
        super().__init__(what)
        self.hint = hint


def node_title(name: str, op_type: str) -> str:
    """Return the description of a node for messages."""
    return f"the node {describe(name)} ({describe(op_type)})"


def check_model(proto: onnx.ModelProto) -> None:
    """Check versions and names, and each node against its operator.

    Raises:
        BadGraph: The model is invalid; the message names the node.
    """
    if not proto.graph.output:
        raise BadGraph("has no graph with outputs")
    for role, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            _check_type(value, f"its {role} {describe(value.name)}")
    if proto.ir_version > onnx.IR_VERSION:
        raise BadGraph(f"has IR version {proto.ir_version}; onnx reads up to {onnx.IR_VERSION}", _UPGRADE)
    if not proto.opset_import:
        raise BadGraph("imports no operator set")
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    if len(functions) < len(proto.functions):
        raise BadGraph("defines a function twice")
    _check_graph(proto.graph, _versions(proto), frozenset())
    for function in proto.functions:
        _check_nodes(function.node, _versions(function), frozenset(), function.input, function.output)
    _check_calls(proto.graph.node, functions)


def name_standard_domain(proto: onnx.ModelProto) -> None:
    """Write the domain ``ai.onnx`` as ``""`` in operator sets and functions; onnx_ir does so in nodes."""
    for part in (proto, *proto.functions):
        for item in part.opset_import:
            item.domain = _plain_domain(item.domain)
    for function in proto.functions:
        function.domain = _plain_domain(function.domain)


def _plain_domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _check_type(value: onnx.ValueInfoProto, title: str) -> None:
    """Reject an input or output of a type that torch lacks."""
    kind = value.type
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    if kind.HasField("map_type"):
        hint = "export it without ZipMap: to_onnx(..., options={'zipmap': False})"
        raise BadGraph(f"{title} is a map, and torch has no type for maps", hint)
    if kind.tensor_type.elem_type == onnx.TensorProto.STRING:
        hint = "encode text before the model, and name its labels after it"
        raise BadGraph(f"{title} is text, and torch has no type for text", hint)


def _versions(proto: Any) -> dict[str, int]:
    versions = {item.domain: item.version for item in proto.opset_import}
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= versions.get("", 1) <= newest:
        raise BadGraph(f"needs operator set {versions['']}; onnx knows 1 to {newest}", _UPGRADE)
    return versions


def _check_graph(graph: onnx.GraphProto, versions: Mapping[str, int], outer: frozenset[str]) -> None:
    if graph.sparse_initializer:
        name = describe(graph.sparse_initializer[0].values.name)
        raise BadGraph(f"the initializer {name!r} is sparse", "store it as a dense tensor")
    inputs = [value.name for value in graph.input]
    stored = [tensor.name for tensor in graph.initializer]
    outputs = [value.name for value in graph.output]
    for kind, names in (("input", inputs), ("initializer", stored), ("output", outputs)):
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise BadGraph(f"the {kind} {describe(twice)!r} is defined twice")
    for tensor in graph.initializer:
        _check_location(tensor)
    _check_nodes(graph.node, versions, outer, {*inputs, *stored}, outputs)


def _check_location(tensor: onnx.TensorProto) -> None:
    """Check the offset and length of external data."""
    for entry in tensor.external_data:
        if entry.key in ("offset", "length") and not _NUMBER.fullmatch(entry.value):
            what = f"{entry.key} {describe(entry.value)!r}"
            raise BadGraph(f"the data of {describe(tensor.name)!r} cannot have the {what}")


def _check_nodes(
    nodes: Any, versions: Mapping[str, int], outer: frozenset[str], initial: Any, outputs: Sequence[str]
) -> None:
    local = set(initial)
    for node in nodes:
        for name in filter(None, node.output):
            if name in local:
                raise BadGraph(f"{_title(node)} computes {describe(name)!r} a second time")
            local.add(name)
    visible = outer | local
    for name in (*local, *(node.name for node in nodes)):
        if len(name) > _MAX_NAME:
            what = f"the name {describe(name)} has {len(name):,} characters"
            raise BadGraph(f"{what}; at most {_MAX_NAME:,} are allowed")
    for node in nodes:
        for name in node.input:
            if name and name not in visible:
                raise BadGraph(f"{_title(node)} reads {describe(name)!r}, which nothing computes")
        for attribute in node.attribute:
            _check_location(attribute.t)
        _check_operator(node, versions)
        for graph in _bodies(node):
            _check_graph(graph, versions, visible)
    for name in outputs:
        if name not in visible:
            raise BadGraph(f"nothing computes the output {describe(name)!r}")


def _title(node: onnx.NodeProto) -> str:
    return node_title(node.name or next(iter(node.output), ""), node.op_type)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _check_operator(node: onnx.NodeProto, versions: Mapping[str, int]) -> None:
    """Check a standard node against the definition of its operator."""
    if _plain_domain(node.domain):
        return
    schema = schema_of("", node.op_type, versions.get("", 1))
    if schema is None:
        return
    for what, count, least, most in (
        ("inputs", len(node.input), schema.min_input, schema.max_input),
        ("outputs", len(node.output), 0, schema.max_output),
    ):
        if not least <= count <= most:
            raise BadGraph(f"{_title(node)} has {count} {what}; its operator has {least} to {most}")
    attributes = {attribute.name: attribute for attribute in node.attribute}
    for name, definition in schema.attributes.items():
        if name in attributes:
            kind = attributes[name].type
            if kind and kind != int(definition.type):
                raise BadGraph(f"{_title(node)}: its attribute {name} must be of type {definition.type.name}")
        elif definition.required:
            raise BadGraph(f"{_title(node)} lacks the attribute {name}")


@cache
def schema_of(domain: str, op_type: str, version: int) -> Any:
    """Return the schema of an operator; ``None`` if there is none."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _check_calls(nodes: Any, functions: Mapping[_Function, onnx.FunctionProto]) -> None:
    """Check that functions do not recurse, and do not run too many nodes."""
    measured: dict[_Function, tuple[int, int]] = {}  # nodes run by a call, and depth of the calls in it

    def measure(nodes: Any, path: tuple[_Function, ...]) -> tuple[int, int]:
        count, depth = 0, 0
        for node in nodes:
            count += 1
            callee = (_plain_domain(node.domain), node.op_type, node.overload)
            if callee in path:
                raise BadGraph(f"{_title(node)} calls the function that contains it")
            if callee in functions and callee not in measured:
                if len(path) >= _MAX_CALLS:
                    raise BadGraph(f"{_title(node)}: functions call each other more than {_MAX_CALLS} deep")
                measured[callee] = measure(functions[callee].node, (*path, callee))
            parts = [measure(body.node, path) for body in _bodies(node)]
            parts += [measured[callee]] if callee in functions else []
            count += sum(part[0] for part in parts)
            depth = max([depth, *(part[1] + 1 for part in parts)])
            if count > MAX_NODES:
                raise BadGraph(f"{_title(node)}: more than {MAX_NODES:,} nodes run up to here")
            if depth > _MAX_CALLS:
                raise BadGraph(f"{_title(node)}: functions call each other more than {_MAX_CALLS} deep")
        return count, depth

    measure(nodes, ())
