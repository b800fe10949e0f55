"""Names of the nodes and tensors of an ONNX model: of layers, parameters and source lines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["NodeNames", "module_scope", "owner_path", "parameter_place"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"


class NodeNames:
    """Names every node of a model, its constants, and the values that are not read after it."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._last: dict[int, dict[Any, list[str]]] = {}
        self._origins: dict[Any, Mapping[str, Any]] = {}

    def of(self, node: ir.Node) -> str:
        """Return a node's name; that of its first output if it has none."""
        outputs = [output.name for output in node.outputs if output.name]
        return node.name or (outputs[0] if outputs else node.op_type) or node.op_type

    def stored(self, graph: Any, name: str) -> str:
        """Return the name under which an initializer is stored; those of inner graphs get a prefix."""
        if graph is self._model.graph:
            return name
        return f"{name}@{graph.name or id(graph)}"

    def stored_constant(self, node: ir.Node) -> str:
        """Return the name under which the value of a Constant node is stored."""
        graph = node.graph
        assert graph is not None
        return self.stored(graph, f"{node.outputs[0].name}")

    def origin(self, node: ir.Node, caller: str = "") -> Mapping[str, Any]:
        """Return the metadata of the ops of a node: its name as layer, and the line that it comes from.

        A node of a function is named after the node that calls the function, too.
        """
        if (node, caller) not in self._origins:
            name = f"{caller}/{self.of(node)}" if caller else self.of(node)
            found: dict[str, Any] = {"nn_module_stack": {name: (name, node.op_type)}}
            if stack := node.metadata_props.get(_STACK):
                found["stack_trace"] = stack
            self._origins[node, caller] = found
        return self._origins[node, caller]

    def last_uses(self, graph: Any) -> Mapping[Any, list[str]]:
        """Return for each node of a graph the values that only it and nodes before it read."""
        if id(graph) not in self._last:
            last: dict[str, Any] = {}
            for node in graph:
                for value in node.inputs:
                    if value is not None and value.name:
                        last[value.name] = node
                for name in _captured(node):
                    last[name] = node
            kept = {value.name for value in graph.outputs}
            own = {output.name for node in graph for output in node.outputs}
            uses: defaultdict[Any, list[str]] = defaultdict(list)
            for name, node in last.items():
                if name in own and name not in kept:
                    uses[node].append(name)
            self._last[id(graph)] = uses
        return self._last[id(graph)]


def module_scope(node: ir.Node) -> str:
    """Return the path of the module that a node was exported from; empty if the exporter did not say."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    paths: list[str] = (
        [scope for scope in scopes[:-1] if isinstance(scope, str)] if isinstance(scopes, list) else []
    )
    return str(paths[-1]) if paths else ""


def parameter_place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and the attribute for a tensor of that name; dots make modules."""
    module, parts = root, name.split(".") if all(name.split(".")) else [name.replace(".", "_")]
    for part in parts[:-1]:
        if part not in module._modules:
            if hasattr(module, part):
                return root, name.replace(".", "_")
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    leaf = parts[-1]
    while hasattr(module, leaf):
        leaf += "_"
    return module, leaf


def owner_path(root: nn.Module, owner: nn.Module) -> str:
    """Return the path of a module in another."""
    return next(str(path) for path, module in root.named_modules() if module is owner)


def _captured(node: ir.Node) -> set[str]:
    """Return the names that the bodies of a node read from around it."""
    found: set[str] = set()
    for attribute in node.attributes.values():
        graphs = attribute.value if attribute.type.name == "GRAPHS" else (attribute.value,)
        if attribute.type.name not in ("GRAPH", "GRAPHS"):
            continue
        for graph in graphs:
            for inner in graph:
                found |= {str(value.name) for value in inner.inputs if value is not None}
                found |= _captured(inner)
            found |= {str(value.name) for value in graph.outputs}
    return found
