"""Names the nodes and tensors of an ONNX model, and finds their layers and source lines."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
from torch import nn

from ampaudit.core.text import escape_control
from ampaudit.core.untrusted import describe
from ampaudit.trace.replay import MODULE_SCOPE

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
_NUMBERED = re.compile(r"@-?[0-9]+$")
_MAX_NAME = 200  # characters
_MAX_DEPTH = 20  # nested modules


class NodeNames:
    """Unique names for the nodes and stored tensors of a model, and the last uses of values."""

    def __init__(self, model: ir.Model) -> None:
        self._last: dict[int, dict[Any, list[str]]] = {}
        self._origins: dict[Any, Mapping[str, Any]] = {}
        self._graphs: dict[int, int] = {}  # graph numbers by id; the model's graph is 0
        self._names: dict[ir.Node, str] = {}
        times: Counter[str] = Counter()
        for graph in graphs_of(model):
            self._graphs[id(graph)] = len(self._graphs)
            for node in graph:
                name = _plain_name(node)
                times[name] += 1
                self._names[node] = name if times[name] == 1 else f"{name}~{times[name]}"

    def of(self, node: ir.Node) -> str:
        """Return the unique name of a node; an unnamed node is named after its first output."""
        return self._names.get(node) or _plain_name(node)

    def stored(self, graph: Any, name: str) -> str:
        """Return the storage name of an initializer, with a number for those of inner graphs."""
        number = self._graphs.get(id(graph), -1)
        return f"{name}@{number}" if number or _NUMBERED.search(name) else name

    def stored_constant(self, node: ir.Node) -> str:
        """Return the storage name of the value of a Constant node."""
        return self.stored(node.graph, f"{node.outputs[0].name}")

    def origin(self, node: ir.Node, caller: str = "") -> Mapping[str, Any]:
        """Return the metadata of a node's ops: its name as layer, and its source line.

        The name of a node in a function begins with that of the calling node.
        """
        if (node, caller) not in self._origins:
            name = f"{caller}/{self.of(node)}" if caller else self.of(node)
            metadata: dict[str, Any] = {"nn_module_stack": {name: (name, node.op_type, True)}}
            if scope := _module_scope(node):
                metadata[MODULE_SCOPE] = scope
            if stack := node.metadata_props.get(_STACK):
                metadata["stack_trace"] = stack
            self._origins[node, caller] = metadata
        return self._origins[node, caller]

    def last_uses(self, graph: Any) -> Mapping[Any, list[str]]:
        """Return the values that each node of a graph is the last to read."""
        if id(graph) not in self._last:
            last: dict[str, Any] = {}
            for node in graph:
                for value in node.inputs:
                    if value is not None and value.name:
                        last[value.name] = node
                for name in _read_in_bodies(node):
                    last[name] = node
            outputs = {value.name for value in graph.outputs}
            computed = {output.name for node in graph for output in node.outputs}
            uses: defaultdict[Any, list[str]] = defaultdict(list)
            for name, node in last.items():
                if name in computed and name not in outputs:
                    uses[node].append(name)
            self._last[id(graph)] = uses
        return self._last[id(graph)]


def graphs_of(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """Yield the model's graph and its functions, each followed by the graphs nested in it."""
    outers: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for outer in outers:
        yield outer
        yield from outer.subgraphs()


def layer_name(origin: Mapping[str, Any]) -> str:
    """Return the layer from the metadata of a node's ops."""
    return str(next(iter(origin["nn_module_stack"])))


def _plain_name(node: ir.Node) -> str:
    outputs = (output.name for output in node.outputs if output.name)
    return shorten_name(node.name or next(outputs, node.op_type))


def _module_scope(node: ir.Node) -> str:
    """Return the path of the exported module that a node comes from; empty if unknown."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    paths = [scope for scope in scopes[:-1] if isinstance(scope, str)] if isinstance(scopes, list) else []
    return shorten_name(paths[-1]) if paths else ""


def parameter_place(root: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """Return the module, its path, and the attribute under which to store a tensor; dots separate modules.

    Names are changed where a tensor would hide another one or an attribute of a module.
    """
    parts = name.split(".")
    if len(parts) > _MAX_DEPTH or not all(parts) or len(name) > _MAX_NAME:
        parts = [shorten_name(name).replace(".", "_")]
    module = root
    for index, part in enumerate(parts[:-1]):
        if part not in module._modules:
            if _is_taken(module, part):  # by a tensor, as in a and a.b, or an attribute of nn.Module
                parts = [*parts[:index], "_".join(parts[index:])]
                break
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    leaf = f"tensor{parts[-1]}" if parts[-1][:1] in ("", "_") else parts[-1]
    while _is_taken(module, leaf):
        leaf += "_"
    return module, ".".join(parts[:-1]), leaf


def _is_taken(module: nn.Module, name: str) -> bool:
    return not name or name.startswith("_") or hasattr(module, name)


def shorten_name(name: str) -> str:
    """Return a printable name; a long one is shortened in the middle, with a hash that keeps it distinct."""
    if len(name) <= _MAX_NAME:
        return escape_control(name)
    return f"{describe(name, _MAX_NAME)}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def is_constant(node: ir.Node) -> bool:
    """Return whether a node is a constant of the standard."""
    return node.op_type == "Constant" and not node.domain


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """Return the graph attributes of a node."""
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.ref_attr_name is None and attribute.type.name in ("GRAPH", "GRAPHS"):
            bodies += [attribute.value] if attribute.type.name == "GRAPH" else attribute.value
    return bodies


def _read_in_bodies(node: ir.Node) -> set[str]:
    """Return the names of all values that the bodies of a node read, their own and captured ones."""
    names: set[str] = set()
    for graph in bodies_of(node):
        for inner in graph:
            names |= {str(value.name) for value in inner.inputs if value is not None}
            names |= _read_in_bodies(inner)
        names |= {str(value.name) for value in graph.outputs}
    return names
