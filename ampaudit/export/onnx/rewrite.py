"""Chooses the type of each node of an ONNX graph, inserts casts, and stores values in 16 bits.

The decisions of the audit are fixed. Nodes that only move values, or compute constants, may have either type.
The choice with the fewest casts, at most one per value and direction, is a minimum cut of a flow network:
nodes on the side of the source are in float32, those on the side of the sink in 16 bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import onnx_ir as ir
import torch

from ampaudit.export.onnx.types import (
    MOVING,
    NodeTypes,
    SlotType,
    TensorOf,
    constant_of,
    is_float32,
    node_types,
)
from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.source.onnx.names import bodies_of, is_constant

_FLOAT32, _LOW = "float32", "low"  # source and sink of the network; its other nodes are no strings
_CAST_COST, _WIDE_COST = 1000, 1  # a cast is as bad as a thousand nodes that move values in float32
_SMALL = 4096  # size in bytes up to which a value that is needed in both types is stored twice
_TYPED = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "EyeLike", "Bernoulli"}
Use = tuple[ir.Node, int]


@dataclass(slots=True)
class Regions:
    """The types that nodes support, and the choice among them."""

    types: dict[ir.Node, NodeTypes] = field(default_factory=dict)  # of every node's inputs and outputs
    wide: set[ir.Node] = field(default_factory=set)  # nodes that compute in float32

    def is_low(self, node: ir.Node) -> bool:
        """Return whether a node computes in 16 bits."""
        return node in self.types and node not in self.wide

    def slot_is_low(self, node: ir.Node, slot: SlotType) -> bool | None:
        """Return whether an input or output is in 16 bits; ``None`` if it takes either."""
        if slot is SlotType.ANY:
            return None
        return slot is SlotType.CHOSEN and self.is_low(node)


def choose_types(
    graph: ir.Graph, decisions: Mapping[ir.Node, bool], versions: Mapping[str, int], low: str, *, low_io: bool
) -> Regions:
    """Choose a type for each node of a graph and of the bodies inside it.

    Args:
        graph: Graph with the type of every value.
        decisions: Whether a node stays in float32, for each audited node.
        versions: Versions of the operator sets, by domain.
        low: Name of the 16-bit format.
        low_io: Whether the graph takes and returns 16-bit values.
    """
    flow, regions = nx.DiGraph(), Regions()
    flow.add_nodes_from((_FLOAT32, _LOW))
    network = _Network(flow, regions, decisions, versions, low)
    network.add_graph(graph, _LOW if low_io else _FLOAT32)
    if network.free:
        _, (wide, _) = nx.minimum_cut(flow, _FLOAT32, _LOW)
        regions.wide.update(node for node in network.free if node in wide)
    return regions


@dataclass(slots=True)
class _Network:
    """Builds the flow network, with the costs of casts as capacities; ``free`` nodes are undecided."""

    flow: nx.DiGraph
    regions: Regions
    decisions: Mapping[ir.Node, bool]
    versions: Mapping[str, int]
    low: str
    free: list[ir.Node] = field(default_factory=list)

    def add_graph(self, graph: ir.Graph, border: Any) -> None:
        """Add the nodes of a graph whose inputs and outputs have the type of the node ``border``."""
        for node in graph:
            self._add_node(node)
            for body in bodies_of(node):
                self.add_graph(body, node)
        values = [(value, border) for value in graph.inputs]
        values += [(value, node) for node in graph for value in node.outputs if node.op_type != "Constant"]
        outputs = set(graph.outputs)
        for value, producer in values:
            if is_float32(value):
                users = [*self._users(value), *([border] if value in outputs else [])]
                self._add_value(value, self._producer(producer, value), users)

    def _add_node(self, node: ir.Node) -> None:
        types = node_types(node, node.version or self.versions.get(node.domain, 1), self.low)
        self.regions.types[node] = types
        self.flow.add_node(node)
        moves = node.op_type in MOVING and not node.domain
        decided = self.decisions.get(node)
        if not types.takes_low or decided is True or (decided is None and not self._is_free(node)):
            self.regions.wide.add(node)
            self.flow.add_edge(_FLOAT32, node, capacity=float("inf"))
        elif decided is None or moves or node.op_type == "Cast":
            self.free.append(node)
            self.flow.add_edge(node, _LOW, capacity=_WIDE_COST)
        else:
            self.flow.add_edge(node, _LOW, capacity=float("inf"))

    def _is_free(self, node: ir.Node) -> bool:
        """Return whether a node without an audited op may have either type."""
        moves = node.op_type in MOVING or node.op_type in ("Loop", "Scan", "Cast")
        constant = not bodies_of(node) and all(v is None or v.is_initializer() for v in node.inputs)
        return moves or constant or not any(map(is_float32, (*node.inputs, *node.outputs)))

    def _producer(self, producer: Any, value: ir.Value) -> Any:
        """Return the node that determines the type of a value, or the source if that is always float32."""
        node = value.producer()
        if producer in (_FLOAT32, _LOW) or node is None or node is not producer:
            return producer
        slot = self.regions.types[node].outputs[value.index() or 0]
        return _FLOAT32 if slot is SlotType.FLOAT32 else producer

    def _users(self, value: ir.Value) -> Iterator[Any]:
        for use in value.uses():
            node = use.node
            assert node is not None
            slot = self.regions.types[node].inputs[use.idx]
            if slot is not SlotType.ANY:
                yield _FLOAT32 if slot is SlotType.FLOAT32 else node

    def _add_value(self, value: ir.Value, producer: Any, users: list[Any]) -> None:
        """Add the cost of casting a value, which does not depend on the number of users."""
        others = [user for user in dict.fromkeys(users) if user is not producer]
        if not others:
            return
        down, up = (value, "down"), (value, "up")
        self.flow.add_edge(producer, down, capacity=_CAST_COST)
        self.flow.add_edge(up, producer, capacity=_CAST_COST)
        for user in others:
            self.flow.add_edge(down, user, capacity=float("inf"))
            self.flow.add_edge(user, up, capacity=float("inf"))


@dataclass(slots=True)
class Rewriter:
    """Rewrites a model in place."""

    model: ir.Model  # with the type of every value
    regions: Regions
    low: ir.DataType  # the 16-bit format
    tensor_of: TensorOf
    low_io: bool  # whether the graph takes and returns 16-bit values
    stored: set[str] = field(default_factory=set)  # names of the values that are stored in 16 bits
    _names: set[str] = field(default_factory=set)

    def rewrite(self) -> None:
        """Rewrite the graph, and the bodies inside it."""
        graphs = list(self.model.graphs())
        for graph in graphs:
            self._names |= {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
            self._names |= {str(v.name) for node in graph for v in node.outputs}
            self._names |= {str(node.name) for node in graph}
        self._rewrite_graph(self.model.graph, None)
        for graph in graphs:
            self._drop_idle_casts(graph)
            self._detach(graph)

    def _rewrite_graph(self, graph: ir.Graph, parent: ir.Node | None) -> None:
        border = self.low_io if parent is None else self.regions.is_low(parent)
        graph_inputs = [v for v in graph.inputs if is_float32(v) and v.name not in graph.initializers]
        values = [(value, border) for value in graph_inputs]
        for node in list(graph):
            for body in bodies_of(node):
                self._rewrite_graph(body, node)
            if is_constant(node):
                if is_float32(node.outputs[0]):
                    self._convert_stored_value(graph, node.outputs[0], border, node)
                continue
            self._set_type_attribute(node)
            values += [
                (value, self.regions.slot_is_low(node, self.regions.types[node].outputs[index]) is True)
                for index, value in enumerate(node.outputs)
                if is_float32(value)
            ]
        for value in list(graph.initializers.values()):
            if is_float32(value):
                self._convert_stored_value(graph, value, border, None)
        for value, is_low in values:
            self._cast_computed_value(graph, value, is_low, border)

    def _uses(
        self, graph: ir.Graph, value: ir.Value, border: bool
    ) -> tuple[dict[bool, list[Use]], bool | None]:
        """Return the uses of a value by whether they need 16 bits, and whether it does as a graph output."""
        uses: defaultdict[bool, list[Use]] = defaultdict(list)
        for use in value.uses():
            assert use.node is not None
            types = self.regions.types.get(use.node)
            needs = None if types is None else self.regions.slot_is_low(use.node, types.inputs[use.idx])
            if needs is not None:
                uses[needs].append((use.node, use.idx))
        return uses, border if any(output is value for output in graph.outputs) else None

    def _cast_computed_value(self, graph: ir.Graph, value: ir.Value, is_low: bool, border: bool) -> None:
        uses, output = self._uses(graph, value, border)
        others, returned = uses[not is_low], output is not None and output != is_low
        if is_low:
            value.dtype = self.low
        if not others and not returned:
            return
        cast = self._cast(graph, value, to_low=not is_low)
        self._replace(others, cast)
        if returned:  # the output keeps its name
            name = str(value.name)
            value.name, cast.name = cast.name, name
            for index, graph_output in enumerate(graph.outputs):
                if graph_output is value:
                    graph.outputs[index] = cast

    def _convert_stored_value(
        self, graph: ir.Graph, value: ir.Value, border: bool, node: ir.Node | None
    ) -> None:
        """Store a constant in the type of its users; if these differ, store it twice, or cast a large one."""
        uses, output = self._uses(graph, value, border)
        tensor = value.const_value if node is None else constant_of(node)
        if tensor is None or not (uses[True] or output):
            return
        if not uses[False] and output is not False:
            self._store(value, node, self._lazily(tensor, self.low, str(value.name)))
        elif tensor.nbytes <= _SMALL and output is None:
            name = self._unique(f"{value.name}_{self.low.name.lower()}")
            copy = ir.Value(name=name, shape=ir.Shape(_shape(tensor)), type=ir.TensorType(self.low))
            copy.const_value = self._lazily(tensor, self.low, name)
            graph.register_initializer(copy)
            self._replace(uses[True], copy)
        else:
            self._cast_computed_value(graph, value, False, border)

    def _store(self, value: ir.Value, node: ir.Node | None, tensor: ir.TensorProtocol) -> None:
        self.stored.add(str(value.name))
        value.dtype = self.low
        if node is None:
            value.const_value = tensor
            return
        for name in [name for name in node.attributes if name.startswith("value")]:
            del node.attributes[name]
        node.attributes["value"] = ir.AttrTensor("value", tensor)

    def _lazily(self, tensor: ir.TensorProtocol, to: ir.DataType, name: str) -> ir.TensorProtocol:
        """Return a tensor that reads and converts another one on demand."""
        dtype = torch_dtype_of(to)

        def make() -> ir.TensorProtocol:
            converted = self.tensor_of(tensor).to(dtype).contiguous()
            if converted.is_floating_point() and converted.element_size() < 4:
                bits = torch.int16 if converted.element_size() == 2 else torch.int8
                return ir.Tensor(converted.view(bits).numpy().view(to.numpy()), dtype=to, name=name)
            return ir.Tensor(converted.numpy(), dtype=to, name=name)

        return ir.LazyTensor(make, dtype=to, shape=ir.Shape(_shape(tensor)), name=name)

    def _cast(self, graph: ir.Graph, value: ir.Value, *, to_low: bool) -> ir.Value:
        to = self.low if to_low else ir.DataType.FLOAT
        name = self._unique(f"{value.name}_to_{to.name.lower()}")
        output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(to))
        node_name = self._unique(f"Cast_{name}")
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(to))], outputs=[output], name=node_name)
        producer = value.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        else:
            graph.append(node)
        return output

    def _set_type_attribute(self, node: ir.Node) -> None:
        """Set the attribute that defines the result type of a node, if its operator has one."""
        if node.domain or not self.regions.is_low(node):
            return
        if not any(is_float32(value) for value in node.outputs):
            return
        if node.op_type == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", int(self.low))
        elif node.op_type in _TYPED and (node.op_type == "RandomNormal" or "dtype" in node.attributes):
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(self.low))
        elif node.op_type == "ConstantOfShape":
            attribute = node.attributes.get("value")
            filled = torch.zeros(1) if attribute is None else self.tensor_of(attribute.value).reshape(1)
            constant = self._lazily(ir.tensor(filled.numpy()), self.low, "value")
            node.attributes["value"] = ir.AttrTensor("value", constant)

    def _detach(self, graph: ir.Graph) -> None:
        """Replace tensors in the original files by tensors that are read when the new file is written."""
        for value in graph.initializers.values():
            stored = value.const_value
            if isinstance(stored, ir.ExternalTensor):
                value.const_value = self._lazily(stored, stored.dtype, str(value.name))

    def _drop_idle_casts(self, graph: ir.Graph) -> None:
        """Remove casts of a value to its own type."""
        for node in list(graph):
            if node.op_type != "Cast" or node.domain:
                continue
            value, result = node.inputs[0], node.outputs[0]
            if value is None or value.dtype is None or int(value.dtype) != node.attributes["to"].value:
                continue
            if any(output is result for output in graph.outputs):
                continue
            self._replace([(use.node, use.idx) for use in result.uses() if use.node is not None], value)
            if not result.uses():
                graph.remove(node, safe=True)

    def _replace(self, uses: list[Use], value: ir.Value) -> None:
        for node, index in uses:
            node.replace_input_with(index, value)

    def _unique(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(candidate)
        return candidate


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape.numpy())
