"""Builds the graph of an exported program from its JSON, as torch's deserializer does, without code."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from ampaudit.core.untrusted import describe
from ampaudit.source.pt2.operators import operator_named
from ampaudit.source.pt2.schema import Argument, Graph, InputSpec, Node, NodeInput, OutputSpec
from ampaudit.source.pt2.values import (
    LISTS,
    POSITIONAL,
    SYMBOLS,
    attribute_path,
    call_arguments,
    identifier,
    layers_and_line,
    list_item,
    number,
    only,
    result_names,
    setting,
)

__all__ = ["build_graph", "weight_of"]

_PLAIN = ("as_int", "as_ints", "as_bool", "as_bools", "as_string", "as_strings")
_NUMBERS = ("as_float", "as_floats", "as_float_lists")
_MAX_NODES = 100_000  # of all graphs
_CONSTANT_INPUTS = ("as_none", "as_int", "as_float", "as_bool", "as_string")


def build_graph(
    root: nn.Module, graph: Graph, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]
) -> fx.GraphModule:
    """Build a module that takes the program's own inputs; it reads weights from its attributes.

    Args:
        root: holds the weights under their names.
        graph: the nodes, with weights as inputs.
        inputs: what each input of the graph is.
        outputs: what each output of the graph is: the program's, or what it writes to a buffer or an input.

    Raises:
        ValueError: a value that does not exist, an operator that may not be called, or another fault.
    """
    builder = _Builder(root, count())
    if len(graph["inputs"]) != len(inputs) or len(graph["outputs"]) != len(outputs):
        raise ValueError("its graph and its signature differ in the number of inputs or outputs")
    targets: dict[tuple[str, str], fx.Node] = {}
    for given, spec in zip(graph["inputs"], inputs, strict=True):
        key = weight_of(spec)
        node = builder.placeholder(given) if key is None else builder.weight(given, key[1])
        targets[key or ("user_input", node.name)] = node
    builder.add_nodes(graph["nodes"])
    found = [builder.output(given) for given in graph["outputs"]]
    builder.graph.output(_with_writes(builder, found, outputs, targets))
    return fx.GraphModule(builder.root, builder.graph)


def weight_of(spec: InputSpec) -> tuple[str, str] | None:
    """Return the kind and the name of a stored tensor that is an input of the graph; ``None`` for a user's.

    Raises:
        ValueError: an input that only code could make.
    """
    kind, value = only(spec, "input")
    if kind in ("user_input", "constant_input"):
        return None
    name = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
    if kind not in name:
        raise ValueError(f"it takes a {kind}")
    return kind, attribute_path(str(value[name[kind]]))


def _with_writes(
    builder: _Builder,
    found: Sequence[Any],
    specs: Sequence[OutputSpec],
    targets: Mapping[tuple[str, str], fx.Node],
) -> tuple[Any, ...]:
    """Add the program's writes to buffers and inputs; return its own outputs."""
    written: dict[fx.Node, fx.Node] = {}
    own = []
    for value, spec in zip(found, specs, strict=True):
        kind, item = only(spec, "output")
        if kind == "user_output":
            own.append(value)
            continue
        name = {
            "buffer_mutation": ("buffer", "buffer_name"),
            "parameter_mutation": ("parameter", "parameter_name"),
            "user_input_mutation": ("user_input", "user_input_name"),
        }.get(kind)
        if name is None or not isinstance(value, fx.Node):
            raise ValueError(f"it has an output of the kind {kind}")
        target = builder.values.get(item[name[1]]) if name[0] == "user_input" else None
        target = target or targets.get((name[0], str(item[name[1]])))
        if target is None:
            raise ValueError(f"it writes to {describe(item[name[1]])!r}, which does not exist")
        written[value] = builder.graph.call_function(torch.ops.aten.copy_.default, (target, value))
    return tuple(written.get(value, value) if isinstance(value, fx.Node) else value for value in own)


class _Builder:
    """A graph in the making, with the values that it has computed by their names in the file."""

    def __init__(self, root: nn.Module, nodes: Iterator[int]) -> None:
        self.root = root
        self._nodes = nodes  # numbers the nodes of all graphs
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self._inner_graphs: dict[str, Graph] = {}

    def placeholder(self, given: Argument) -> fx.Node:
        """Add an input."""
        kind, value = only(given, "input")
        if kind in _CONSTANT_INPUTS:
            return self._create("placeholder", f"constant_{len(self.graph.nodes)}")
        name = value.get("as_name") if kind in SYMBOLS else value["name"] if kind == "as_tensor" else None
        if name is None:
            raise ValueError(f"it takes an input of the kind {kind}")
        return self._named(self._create("placeholder", identifier(name)), name)

    def weight(self, given: Argument, path: str) -> fx.Node:
        """Add a stored tensor."""
        kind, value = only(given, "input")
        if kind != "as_tensor":
            raise ValueError(f"the weight {describe(path)!r} is not a tensor")
        node = self._create("get_attr", path, name=identifier(path.replace(".", "_")))
        return self._named(node, value["name"])

    def add_nodes(self, nodes: Sequence[Node]) -> None:
        """Add the calls."""
        for node in nodes:
            target = operator_named(node["target"])
            args, kwargs = self._arguments(target, node["inputs"])
            made = self._create("call_function", target, args, kwargs, _name_of(node))
            made.meta = layers_and_line(node["metadata"])
            for value in (*args, *kwargs.values()):
                if isinstance(value, fx.Node) and value.op == "get_attr" and not value.meta:
                    value.meta = dict(made.meta)  # an inner graph has none of its own
            self._results(node, made)

    def output(self, given: Argument) -> Any:
        """Return the node or constant that is an output."""
        kind, value = only(given, "output")
        if kind in (*SYMBOLS, "as_tensor", "as_none", "as_int", "as_float", "as_bool"):
            return self._value(kind, value)
        raise ValueError(f"it returns a value of the kind {kind}")

    def _arguments(self, target: Any, given: Sequence[NodeInput]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = [(item["name"], item.get("kind"), self._argument(item["arg"])) for item in given]
        if not isinstance(target, OpOverload):
            is_named = isinstance(target, HigherOrderOperator)
            args = tuple(v for name, kind, v in values if not is_named or kind == POSITIONAL or not name)
            kwargs = {n: v for n, kind, v in values if is_named and kind != POSITIONAL and n}
            return args, {_keyword(name): value for name, value in kwargs.items()}
        return call_arguments(target, values)

    def _argument(self, given: Argument) -> Any:
        kind, value = only(given, "argument")
        return self._value(kind, value)

    def _value(self, kind: str, value: Any) -> Any:
        """Return an argument as what a call takes: nodes, numbers, dtypes."""
        if kind == "as_none":
            return None
        if kind in _PLAIN:
            return value
        if kind in _NUMBERS:
            return number(value)
        if kind == "as_tensor":
            return self._node(value["name"])
        if kind in SYMBOLS:
            return self._symbol(value)
        if kind == "as_complex":
            return complex(number(value["real"]), number(value["imag"]))
        if kind == "as_int_lists":
            return [tuple(row) for row in value]
        if kind == "as_graph":
            return self._inner(value["name"], value["graph"])
        if kind == "as_operator":
            return operator_named(value)
        if kind in LISTS:
            return [self._value(*list_item(item, LISTS[kind])) for item in value]
        if kind == "as_optional_tensor":
            return self._value(*only(value, "argument"))
        if kind == "as_nested_tensors":
            return [[self._node(item["name"]) for item in row] for row in value]
        if kind == "as_string_to_argument":
            return {name: self._argument(item) for name, item in value.items()}
        return setting(kind, value)

    def _symbol(self, value: Mapping[str, Any]) -> Any:
        kind, found = only(value, "argument")
        return self._node(found) if kind == "as_name" else number(found)

    def _node(self, name: str) -> fx.Node:
        try:
            return self.values[name]
        except KeyError:
            raise ValueError(f"it uses {describe(name)!r} before it is computed") from None

    def _inner(self, name: str, graph: Graph) -> fx.Node:
        """Add a graph that an operator takes, such as a branch of ``torch.cond``."""
        plain = identifier(name)
        if plain not in self._inner_graphs and not hasattr(self.root, plain):
            self._inner_graphs[plain] = graph
            self.root.add_module(plain, _inner_module(graph, self._nodes))
        known = self._inner_graphs.get(plain)
        if known is None or any(known[part] != graph[part] for part in ("inputs", "nodes", "outputs")):
            raise ValueError(f"two inner graphs have the name {describe(name)!r}")
        return self._create("get_attr", plain, name=plain)

    def _results(self, node: Node, made: fx.Node) -> None:
        """Name what a call returns, and take apart what it returns together."""
        results = [result_names(*only(item, "output")) for item in node["outputs"]]
        in_tuple = node.get("is_hop_single_tensor_return") is False
        if len(results) != 1 or (in_tuple and results != [None]):
            self._unpack(made, results)
        elif isinstance(results[0], str):
            self._named(made, results[0])
        elif results[0] is not None:
            self._unpack(made, results[0])

    def _unpack(self, made: fx.Node, results: Sequence[Any]) -> None:
        for index, result in enumerate(results):
            if result is None:
                continue
            part = self._create("call_function", operator.getitem, (made, index))
            part.meta = dict(made.meta)
            if isinstance(result, str):
                self._named(part, result)
            else:
                self._unpack(part, result)

    def _create(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        if next(self._nodes) > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES:,} nodes")
        return self.graph.create_node(kind, target, args, kwargs, name)

    def _named(self, node: fx.Node, name: str) -> fx.Node:
        if name in self.values:
            raise ValueError(f"it computes {describe(name)!r} twice")
        self.values[name] = node
        return node


def _inner_module(graph: Graph, nodes: Iterator[int]) -> fx.GraphModule:
    inner = _Builder(nn.Module(), nodes)
    for given in graph["inputs"]:
        inner.placeholder(given)
    inner.add_nodes(graph["nodes"])
    found = tuple(inner.output(given) for given in graph["outputs"])
    if graph.get("is_single_tensor_return") and len(found) != 1:
        raise ValueError("an inner graph returns one tensor and several")
    inner.graph.output(found[0] if graph.get("is_single_tensor_return") else found)
    return fx.GraphModule(inner.root, inner.graph)


def _name_of(node: Node) -> str | None:
    outputs = node["outputs"]
    name = result_names(*only(outputs[0], "output")) if len(outputs) == 1 else None
    return identifier(name) if isinstance(name, str) else None


def _keyword(name: str) -> str:
    if identifier(name) != name:
        raise ValueError(f"a call has an argument {describe(name)!r}")
    return name
